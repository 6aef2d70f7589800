// Checked access to the buffers of Python objects.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace bagua {

// The buffers of one call, kept while it runs. Raises ValueError for one that is too short, unaligned, read-only or not
// contiguous.
class PythonBuffers {
 public:
  uint8_t* hold(const pybind11::buffer& buffer, size_t bytes, size_t alignment, bool writable, const char* name) {
    views_.push_back(buffer.request(writable));
    const pybind11::buffer_info& view = views_.back();
    if (PyBuffer_IsContiguous(view.view(), 'C') == 0) {
      throw pybind11::value_error(std::string(name) + " is not contiguous");
    }
    if (static_cast<size_t>(view.size * view.itemsize) < bytes) {
      throw pybind11::value_error(std::string(name) + " has " + std::to_string(view.size * view.itemsize) +
                                  " bytes, needs " + std::to_string(bytes));
    }
    if (bytes != 0 && reinterpret_cast<uintptr_t>(view.ptr) % alignment != 0) {
      throw pybind11::value_error(std::string(name) + " is not aligned to " + std::to_string(alignment) + " bytes");
    }
    return static_cast<uint8_t*>(view.ptr);
  }
  float* floats(const pybind11::buffer& buffer, size_t count, bool writable, const char* name) {
    return reinterpret_cast<float*>(hold(buffer, count * sizeof(float), alignof(float), writable, name));
  }

 private:
  std::vector<pybind11::buffer_info> views_;
};

}  // namespace bagua
