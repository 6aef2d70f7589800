// Chooses the congestion control of a TCP connection, and with it whether sending is paced.
//
// BBR, the default of many systems, sends every segment by a timer of its own. On a long wire that keeps queues short.
// Within a machine or a room it mostly costs processor time: 64 MiB both ways over a veth pair took 42 ms with BBR, 22
// with cubic or reno, and 27 where BBR was replaced only later, as a socket that has once paced goes on doing so. So
// sockets begin without BBR, and those whose round trip is long go back to it. Any other choice of the system stays.
//
// BAGUA_TCP_CONGESTION=system leaves all to the system; auto is the same as nothing.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace bagua {

constexpr uint32_t kNearUs = 1000;  // the longest round trip at which nothing is paced

// kInvalid: the setting is neither of the two.
Status check_congestion_setting();
// Before connect() or listen(); accepted sockets inherit it. Where it is not allowed, nothing changes.
void begin_without_pacing(int fd);
// Once connected: back to the system's choice if the round trip is longer than `near_us` or not known.
void pace_if_far(int fd, uint32_t near_us = kNearUs);

}  // namespace bagua
