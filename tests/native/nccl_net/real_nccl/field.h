// A field of a struct of NCCL's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua::nccl_net::real {

constexpr size_t kAbsent = SIZE_MAX;  // this version does not have the field

// Lies at `offset` in a struct of which nothing else is known; of an array, the element `index`.
template <class T>
struct Field {
  size_t offset;
  size_t stride = sizeof(T);

  T& operator()(void* object, size_t index = 0) const {
    return *reinterpret_cast<T*>(static_cast<char*>(object) + offset + index * stride);
  }
  // Where the version has it.
  void set(void* object, T value, size_t index = 0) const {
    if (offset != kAbsent) (*this)(object, index) = value;
  }
};

}  // namespace bagua::nccl_net::real
