// Opens a shared library at run time and looks up functions in it. Header only: the GPU leg uses it, too, and does not
// link with the core.
#pragma once

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

#include "base/status.h"

namespace bagua {

// The library stays open until the process ends, because its streams, hooks and threads outlive every user.
class Library {
 public:
  // Opens the file that the environment variable `variable` names; set but empty, it forbids the library. Without the
  // variable: the first of `names` that the process has loaded already, else the first that can be loaded.
  static Status open(const char* variable, const std::vector<std::string>& names, Library* out) {
    const char* const chosen = std::getenv(variable);
    if (chosen != nullptr && *chosen == '\0') return {Code::kUnavailable, std::string(variable) + " is empty"};
    const std::vector<std::string> tried = chosen != nullptr ? std::vector<std::string>{chosen} : names;
    std::string why = "no name to look for";
    for (const int more : {RTLD_NOLOAD, 0}) {
      for (const std::string& name : tried) {
        void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | more);
        if (handle == nullptr) {
          const char* const text = dlerror();
          if (more == 0 && text != nullptr) why = text;
          continue;
        }
        out->handle_ = handle;
        out->path_ = path_of(handle, name);
        return Status::ok();
      }
    }
    return {Code::kUnavailable, why};
  }

  // Looks up the names in order and returns the first function that exists, or nullptr.
  void* find(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (void* const found = dlsym(handle_, name); found != nullptr) return found;
    }
    return nullptr;
  }
  const std::string& path() const { return path_; }

 private:
  static std::string path_of(void* handle, const std::string& name) {
    link_map* map = nullptr;
    const bool known = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name[0] != '\0';
    return known ? map->l_name : name;
  }

  void* handle_ = nullptr;
  std::string path_;
};

// Fills a table of functions; remembers the first one that is missing.
class LibraryTable {
 public:
  explicit LibraryTable(const Library& library) : library_(library) {}
  template <class F>
  void need(F* slot, std::initializer_list<const char*> names) {
    *slot = reinterpret_cast<F>(library_.find(names));
    if (*slot == nullptr && missing_.empty()) missing_ = *names.begin();
  }
  const std::string& missing() const { return missing_; }

 private:
  const Library& library_;
  std::string missing_;
};

}  // namespace bagua
