// Chooses the congestion control of a TCP connection, and with it whether sending is paced.
//
// BBR, the default of many systems, paces: it sends every segment by a timer. With long round trips this keeps queues
// short. Within a machine or a room it mostly costs processor time: 64 MiB in both directions over a veth pair took
// 42 ms with BBR and 22 ms with cubic or reno. It took 27 ms where BBR was replaced after the connection, because a
// socket that has paced once goes on pacing. So sockets begin without BBR, and those with a long round trip return to
// it. A system's default other than BBR is left alone.
//
// BAGUA_TCP_CONGESTION=system keeps the system's choice everywhere; auto is the default.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace bagua {

constexpr uint32_t kNearUs = 1000;  // connections with a round trip up to this are not paced

// kInvalid: BAGUA_TCP_CONGESTION is neither `system` nor `auto`.
Status check_congestion_setting();
// Replaces BBR. Call it before connect() or listen(); accepted sockets inherit it. Without permission it does nothing.
void begin_without_pacing(int fd);
// Call it once connected: returns to the system's choice if the round trip is unknown or longer than `near_us`.
void pace_if_far(int fd, uint32_t near_us = kNearUs);

}  // namespace bagua
