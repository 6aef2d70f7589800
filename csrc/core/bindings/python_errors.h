// Errors of the core as exceptions of Python, and values that come from it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "base/clock.h"
#include "base/error_codes.h"
#include "base/status.h"

namespace bagua {

struct CoreError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The generation has ended, and the job has not.
struct Regrouped : CoreError {
  using CoreError::CoreError;
};

// The job goes on without this process, as was planned.
struct Dismissed : CoreError {
  using CoreError::CoreError;
};

inline void check(const Status& status) {
  if (status.code() == Code::kDismissed) throw Dismissed(status.message());
  if (status.code() == Code::kRegrouped) throw Regrouped(status.message());
  if (!status) throw CoreError(coded(status));
}

// Text that came from other processes need not be UTF-8.
inline pybind11::str text(const std::string& bytes) {
  PyObject* decoded = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
  if (decoded == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(decoded);
}

inline int64_t seconds(double s) {
  if (s < 0) return -1;
  return s > 1e9 ? int64_t{1'000'000'000} * 1'000'000'000 : static_cast<int64_t>(s * 1e9);
}

inline int64_t deadline_after(double s) {
  return s < 0 ? -1 : now_ns() + seconds(s);
}

}  // namespace bagua
