#include "device/api/library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>

namespace bagua::device {

namespace {

std::string path_of(void* handle, const std::string& name) {
  link_map* map = nullptr;
  const bool known = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name[0] != '\0';
  return known ? map->l_name : name;
}

}  // namespace

Status Library::open(const char* variable, const std::vector<std::string>& names, Library* out) {
  const char* const chosen = getenv(variable);
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

void* Library::find(std::initializer_list<const char*> names) const {
  for (const char* name : names) {
    if (void* const found = dlsym(handle_, name); found != nullptr) return found;
  }
  return nullptr;
}

}  // namespace bagua::device
