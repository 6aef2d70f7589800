#include "engine/remote/control.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "transport/mesh.h"

namespace bagua {

namespace {

// Little-endian, as every platform of the core is.
class Writer {
 public:
  template <class T>
  void add(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void add(const std::string& text) { bytes_ += text; }
  void add(const std::vector<int>& list) {
    add(static_cast<uint32_t>(list.size()));
    for (const int one : list) add(one);
  }
  std::string finish() { return bytes_.substr(0, Mesh::kMaxControl); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}

  template <class T>
  void take(T* value) {
    if (left_.size() < sizeof *value) {
      broken_ = true;
      return;
    }
    memcpy(value, left_.data(), sizeof *value);
    left_.remove_prefix(sizeof *value);
    if constexpr (std::is_same_v<T, Descriptor>) broken_ |= !kind_known(value->kind);
  }
  void take(std::string* text) { *text = std::exchange(left_, {}); }
  void take(std::vector<int>* list) {
    uint32_t size = 0;
    take(&size);
    list->resize(std::min<size_t>(size, left_.size() / sizeof(int)));
    broken_ |= list->size() < size;
    for (int& one : *list) take(&one);
  }
  bool well() const { return !broken_ && left_.empty(); }

 private:
  std::string_view left_;
  bool broken_ = false;
};

template <size_t kIndex = 0>
bool read_nth(size_t index, Reader* reader, Control* control) {
  if constexpr (kIndex < std::variant_size_v<Control>) {
    if (index != kIndex) return read_nth<kIndex + 1>(index, reader, control);
    std::apply([reader](auto&... field) { (reader->take(&field), ...); }, control->emplace<kIndex>().fields());
    return reader->well();
  } else {
    return false;
  }
}

}  // namespace

std::string encode(Control control) {
  Writer writer;
  writer.add(static_cast<uint32_t>(control.index()));
  const auto add_all = [&writer](auto&... field) { (writer.add(field), ...); };
  std::visit([&add_all](auto& message) { std::apply(add_all, message.fields()); }, control);
  return writer.finish();
}

bool decode(const std::string& bytes, Control* control) {
  Reader reader(bytes);
  uint32_t type = UINT32_MAX;
  reader.take(&type);
  return read_nth(type, &reader, control);
}

}  // namespace bagua
