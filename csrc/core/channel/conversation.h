// The rank's side of the protocol: dials the daemon's socket, asks and waits for the answer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/status.h"
#include "channel/protocol.h"

namespace bagua {

// Connects with a deadline: the daemon's listen queue may be full for a moment. kUnavailable: nobody is there.
Status dial(const std::string& path, int64_t deadline_ns, Fd* out);

// One request, with a descriptor if it is not negative, and its answer: *reply, and a status with its code and words.
// kUnavailable: the other end has gone; *answered tells it from an answer with that code.
Status converse(int socket, const std::vector<char>& packet, int descriptor, int64_t deadline_ns, Reply* reply,
                std::vector<Fd>* descriptors, bool* answered);

// Hello of this member, with the lifeline of this process: see converse().
Status greet(int socket, int member, const uint8_t* token, int64_t deadline_ns, Reply* reply,
             std::vector<Fd>* descriptors, bool* answered);

std::vector<char> packet_of(const Request& request, const std::vector<int>& members);

}  // namespace bagua
