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

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace bagua {

// Another user than this process's: for a caller that may change users (root).
struct SpawnUser {
  struct Limit {  // as for setrlimit
    int resource;
    uint64_t soft;
    uint64_t hard;
  };
  uid_t uid = 0;
  gid_t gid = 0;
  std::vector<gid_t> groups;  // all of them
  mode_t umask = 022;
  std::vector<Limit> limits;  // set before the change: they may lie above those of the caller
};

struct SpawnRequest {
  std::vector<std::string> argv;  // argv[0] without a slash is looked up in the PATH of `env`
  std::vector<std::string> env;   // "NAME=value", the whole environment
  std::string cwd;
  int stdout_fd = -1;
  int stderr_fd = -1;
  int death_signal = 9;  // sent to the child when this process dies; 0: none
  std::optional<SpawnUser> user;
};

// Starts the program with stdin from /dev/null, every descriptor above 2 closed, default signal handlers and an empty
// signal mask, in a session and process group of its own. Returns when the program runs, or when it could not be
// started: then `error` holds the errno value, and the Status names program and folder. Any thread may call it: the
// child's parent is a thread that lives as long as the process, so the end of the calling thread does not trigger
// `death_signal`.
//
// With a `user` the child takes limits, groups, group and user, in this order, drops all capabilities and the caller's
// session keyring, and only then enters the folder and looks at the program. It fails if one of these steps does. That
// user can stop the child before execve; after ten seconds it is killed, so nobody can hold up the caller.
Status spawn(const SpawnRequest& request, pid_t* pid, int* error);

}  // namespace bagua
