// Codes of errors for users: docs/errors says for each what happened and what to do.
#pragma once

#include <string>

#include "base/status.h"

namespace bagua {

// The text of a failure with the code of its kind, such as "… was lost [BG502]". A text that has a code keeps it, and
// so does the end of a generation: the code that goes on says what that means for the operation.
inline std::string coded(const Status& status) {
  const char* code = "";
  switch (status.code()) {
    case Code::kOk:
    case Code::kRegrouped:
    case Code::kDismissed:
    case Code::kLater:
      return status.message();
    case Code::kInvalid:
      code = "[BG501]";
      break;
    case Code::kUnavailable:
      code = "[BG502]";
      break;
    case Code::kTimeout:
      code = "[BG503]";
      break;
    case Code::kCorrupt:
      code = "[BG504]";
      break;
    case Code::kResource:
      code = "[BG505]";
      break;
    case Code::kAborted:
      code = "[BG506]";
      break;
    case Code::kInternal:
      code = "[BG507]";
      break;
  }
  if (status.message().find(" [BG") != std::string::npos) return status.message();
  return status.message() + " " + code;
}

}  // namespace bagua
