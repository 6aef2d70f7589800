#include "base/scarcity.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "base/text.h"

namespace bagua {

namespace {

constexpr int64_t kPauseNs = 100 * kNsPerMs;
constexpr int64_t kTellEveryNs = 60 * kNsPerS;

}  // namespace

bool is_scarcity(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

std::string scarcity_text(int error) {
  const std::string text = errno_text(error);
  if (error == ENFILE) return text + ": the whole machine has no file descriptor left (raise fs.file-max)";
  if (error != EMFILE) return text + ": the kernel has no memory for a connection";
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return text + ": this process may have " + std::to_string(limit.rlim_cur) +
         " file descriptors, and all are in use (raise the limit: ulimit -n, or LimitNOFILE= of a systemd unit)";
}

std::string no_thread_text() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NPROC, &limit);
  const std::string most = limit.rlim_cur == RLIM_INFINITY ? "any number" : "at most " + std::to_string(limit.rlim_cur);
  return "no further thread or process can be started: this user may have " + most +
         " (ulimit -u, LimitNPROC= of a systemd unit), and its control group as many as its pids.max says (TasksMax= " +
         "of a systemd unit, --pids-limit of a container). Raise the one that is reached, or start fewer";
}

std::string AcceptPause::begin(const std::string& why, int64_t now_ns) {
  until_ns_ = now_ns + kPauseNs;
  if (told_ns_ >= 0 && now_ns - told_ns_ < kTellEveryNs) return "";
  told_ns_ = now_ns;
  return "connections wait until there are descriptors for them: " + why;
}

int AcceptPause::timeout_ms(int limit_ms, int64_t now_ns) const {
  if (!lasts(now_ns)) return limit_ms;
  const int left_ms = static_cast<int>((until_ns_ - now_ns) / kNsPerMs) + 1;
  return limit_ms < 0 ? left_ms : std::min(limit_ms, left_ms);
}

}  // namespace bagua
