// Starts the program of a rank: in a session of its own, without inherited descriptors. The kernel kills it when the
// daemon dies.
//
// Python's subprocess module does not suffice. The child itself must ask for its death signal, and subprocess can run
// code in the child only after a fork, which copies the page tables of the daemon. Measured for 64 programs on two
// loaded cores (tests/bench/spawn.py), with 50 MiB and with 2 GiB of heap in the daemon:
//   spawn()                                            0.30 s   0.25 s
//   subprocess.Popen without a death signal            0.35 s   0.28 s
//   subprocess.Popen that runs `setpriv --pdeathsig`   0.31 s   0.36 s
//   subprocess.Popen with preexec_fn                    1.4 s   25.8 s, and the daemon's loop stands still
// `setpriv` would be fast enough. But not every system has it, it does not notice a daemon that died before the death
// signal was requested, and a program that can't be executed ends with an exit code instead of an error with a reason.
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
// signal mask, in a session and process group of its own. Returns when the program runs, or when it could not be
// started: then `error` holds the errno value, and the Status names program and folder. Any thread may call it: the
// child's parent is a thread that lives as long as the process, so the end of the calling thread does not trigger
// `death_signal`.
Status spawn(const SpawnRequest& request, pid_t* pid, int* error);

}  // namespace bagua
