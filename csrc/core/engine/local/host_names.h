// Names of other hosts in messages for people, who know the hosts of the job and their ranks.
#pragma once

#include <string>

#include "engine/local/communicator.h"
#include "engine/values/options.h"

namespace bagua {

// "host 1 (ranks 2, 3)", for the host with number `peer` in the communicator.
std::string host_text(const Membership& membership, const Communicator& comm, int peer);

}  // namespace bagua
