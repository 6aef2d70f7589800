// A shared library that is opened at run time, and the functions taken from it.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace bagua::device {

// Stays open until the process ends: streams, hooks and threads of such libraries outlive any user.
class Library {
 public:
  // The file that the environment variable names (empty: none at all), else the first of `names` that the process has
  // loaded already, else the first that can be loaded.
  static Status open(const char* variable, const std::vector<std::string>& names, Library* out);

  // The function of the first name that exists; nullptr if there is none.
  void* find(std::initializer_list<const char*> names) const;
  const std::string& path() const { return path_; }
  bool is_open() const { return handle_ != nullptr; }

 private:
  void* handle_ = nullptr;
  std::string path_;
};

}  // namespace bagua::device
