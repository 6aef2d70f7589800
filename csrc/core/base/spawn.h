// Starts a program as a rank: own session, no inherited descriptor, dies with the daemon.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/status.h"

namespace bagua {

struct SpawnRequest {
  std::vector<std::string> argv;  // argv[0] without a slash is looked up in the PATH of `env`
  std::vector<std::string> env;   // "NAME=value", the whole environment
  std::string cwd;
  int stdout_fd = -1;
  int stderr_fd = -1;
  int death_signal = 9;  // sent to the child when this process dies; 0: none
};

// Starts the program with stdin from /dev/null, every descriptor above 2 closed, default signal handlers and an empty
// signal mask, in a session and process group of its own. Returns once the program runs or has failed to; `error` then
// holds the errno value and the Status names program and folder. Any thread: the child's parent is a thread that lives
// as long as the process, so that a caller's end does not trigger `death_signal`.
Status spawn(const SpawnRequest& request, pid_t* pid, int* error);

}  // namespace bagua
