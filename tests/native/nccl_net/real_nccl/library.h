// libnccl.so.2: its functions by name, also those that it does not export, and stand-ins in place of a few.
#pragma once

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace bagua::nccl_net::real {

// Says why, and ends the process at once: threads of NCCL may be anywhere.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::puts("");
  std::fflush(stdout);
  ::_exit(1);
}

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

inline Library::Library(const char* path) {
  void* handle = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) fail("%s", ::dlerror());
  link_map* map = nullptr;
  if (::dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) fail("%s", ::dlerror());
  base_ = reinterpret_cast<char*>(map->l_addr);

  // .symtab is not among what the linker maps.
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  struct stat status{};
  if (fd < 0 || ::fstat(fd, &status) != 0) fail("%s can't be read", path);
  void* mapped = ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  ::close(fd);
  if (mapped == MAP_FAILED) fail("%s can't be read", path);
  const char* file = static_cast<char*>(mapped);
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(file);
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(file + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    first_ = reinterpret_cast<const Elf64_Sym*>(file + sections[i].sh_offset);
    count_ = sections[i].sh_size / sizeof(Elf64_Sym);
    names_ = file + sections[sections[i].sh_link].sh_offset;
  }
}

inline const Elf64_Sym& Library::symbol(const char* name) const {
  const Elf64_Sym* found = nullptr;
  for (const Elf64_Sym* each = first_; each != first_ + count_; ++each) {
    if (each->st_shndx == SHN_UNDEF || std::strcmp(names_ + each->st_name, name) != 0) continue;
    if (found != nullptr) fail("%s is twice in the library's table of symbols", name);
    found = each;
  }
  if (found == nullptr) fail("%s is not in the library's table of symbols", name);
  return *found;
}

inline void Library::replace(const char* name, void* stand_in) const {
  replace(symbol(name), stand_in);
}

inline void Library::replace_all(const char* beginning, void* stand_in) const {
  int count = 0;
  for (const Elf64_Sym* each = first_; each != first_ + count_; ++each) {
    const char* name = names_ + each->st_name;
    if (each->st_shndx == SHN_UNDEF || ELF64_ST_TYPE(each->st_info) != STT_FUNC) continue;
    if (std::strncmp(name, beginning, std::strlen(beginning)) != 0 || std::strstr(name, ".cold") != nullptr) continue;
    replace(*each, stand_in);
    ++count;
  }
  if (count == 0) fail("no function in the library's table of symbols begins with %s", beginning);
}

inline void Library::replace(const Elf64_Sym& symbol, void* stand_in) const {
  uint8_t jump[12] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};  // mov rax, stand_in; jmp rax
  std::memcpy(jump + 2, &stand_in, sizeof stand_in);
  if (symbol.st_size < sizeof jump) fail("%s is too short for a jump", names_ + symbol.st_name);
  char* code = base_ + symbol.st_value;
  char* page = code - reinterpret_cast<uintptr_t>(code) % 4096;
  const size_t size = static_cast<size_t>(code - page) + sizeof jump;
  if (::mprotect(page, size, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) fail("the code can't be written");
  std::memcpy(code, jump, sizeof jump);
  ::mprotect(page, size, PROT_READ | PROT_EXEC);
}

}  // namespace bagua::nccl_net::real
