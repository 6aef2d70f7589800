// Lack of file descriptors, or of processes: which errors mean it, words for it, and how a thread that accepts
// connections lives with it.
//
// Thread safety: the functions any thread; an AcceptPause belongs to the thread that accepts.
#pragma once

#include <cstdint>
#include <string>

namespace bagua {

// Whether an errno value says that this process or the machine has no descriptor left, or no memory for one.
bool is_scarcity(int error);

// Words for such a value: what is used up, and what to do.
std::string scarcity_text(int error);

// Words for a thread or process that could not be started (EAGAIN).
std::string no_thread_text();

// A connection that can't be accepted stays in the kernel's queue, and poll() tells of it at once, again and again. So
// the listener is left out of poll() for a moment after each attempt that failed.
class AcceptPause {
 public:
  // An attempt has failed because of `why`. Words for the log: at first, then once a minute; else empty.
  std::string begin(const std::string& why, int64_t now_ns);
  bool lasts(int64_t now_ns) const { return now_ns < until_ns_; }
  // The timeout of a poll() that would wait for `limit_ms` (-1: for ever) if there were no pause.
  int timeout_ms(int limit_ms, int64_t now_ns) const;

 private:
  int64_t until_ns_ = 0;
  int64_t told_ns_ = -1;  // -1: never
};

}  // namespace bagua
