// Codes of errors for users: docs/errors says for each what happened and what to do.
#pragma once

#include <string>

#include "base/status.h"

namespace bagua {

// The text of a failure with the code of its kind, such as "… was lost [BG502]". A text that has a code keeps it, and
// so does the end of a generation: the code that goes on says what that means for the operation.
inline std::string coded(const Status& status) {
  constexpr const char* kCodes[] = {"",        "[BG501]", "[BG502]", "[BG503]", "[BG504]", "[BG505]",
                                    "[BG506]", "",        "",        "",        "[BG507]"};  // by Code
  const std::string code = kCodes[static_cast<size_t>(status.code())];
  if (code.empty() || status.message().find(" [BG") != std::string::npos) return status.message();
  return status.message() + " " + code;
}

}  // namespace bagua
