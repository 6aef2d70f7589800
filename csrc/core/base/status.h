// The result type of all calls of the core. Errors are values: no exception crosses a module's boundary.
#pragma once

#include <string>
#include <utility>

namespace bagua {

enum class Code : unsigned char {
  kOk = 0,
  kInvalid,      // the caller's arguments or the ranks' calls do not fit
  kUnavailable,  // a peer is gone or can't be reached: recoverable by a new generation
  kTimeout,
  kCorrupt,   // bytes that can't be what the peer meant
  kResource,  // memory, descriptors
  kAborted,
  kRegrouped,  // the generation has ended: the next one may follow
  kInternal,
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  static Status ok() { return {}; }
  bool is_ok() const { return code_ == Code::kOk; }
  explicit operator bool() const { return is_ok(); }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

}  // namespace bagua
