// libnccl.so.2: its functions by name, also those that it does not export, and stand-ins in place of a few.
#pragma once

#include <elf.h>

#include <cstddef>

namespace bagua::nccl_net::real {

// Says why, and ends the process at once: threads of NCCL may be anywhere.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

class Library {
 public:
  explicit Library(const char* path);

  // A function or a table, by its mangled name in .symtab. Fails where there is not exactly one.
  template <class T>
  T find(const char* name) const {
    return reinterpret_cast<T>(base_ + symbol(name).st_value);
  }

  // From now on the function jumps to `stand_in`.
  void replace(const char* name, void* stand_in) const;
  // The same for every function whose mangled name begins so; versions differ in the arguments at the end.
  void replace_all(const char* beginning, void* stand_in) const;

 private:
  void replace(const Elf64_Sym& symbol, void* stand_in) const;
  const Elf64_Sym& symbol(const char* name) const;

  char* base_;  // where the linker put it
  const Elf64_Sym* first_ = nullptr;
  size_t count_ = 0;
  const char* names_ = nullptr;
};

}  // namespace bagua::nccl_net::real
