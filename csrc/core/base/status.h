// The result type of all calls of the core. Errors are values: modules throw no exceptions at each other.
#pragma once

#include <string>
#include <utility>

namespace bagua {

enum class Code : unsigned char {
  kOk = 0,
  kInvalid,      // wrong arguments, or calls of different ranks that do not match
  kUnavailable,  // a peer is lost or can't be reached: a new generation can go on
  kTimeout,
  kCorrupt,   // damaged or forged bytes
  kResource,  // memory, descriptors
  kAborted,
  kRegrouped,  // the generation has ended: the next one may follow
  kDismissed,  // the job goes on without this process, as was planned
  kLater,      // a peer is well, and asks to be asked again: inside the core
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
