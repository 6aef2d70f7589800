// Binds the codec kernels to Python, for tests and benchmarks; typed by ../../core.pyi.
#include "codec/codec.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/python_buffer.h"

namespace py = pybind11;

namespace bagua {
namespace {

Encoding encoding_of(int codec, int density) {
  if (codec < 0 || codec > 255 || density < 0 || density > 65535 ||
      !encoding_known(static_cast<uint8_t>(codec), static_cast<uint16_t>(density))) {
    throw py::value_error("codec " + std::to_string(codec) + " with density " + std::to_string(density) +
                          " is not known: see CODECS; topk needs a density of 1 to 65535, the others 0");
  }
  return {static_cast<Codec>(codec), static_cast<uint16_t>(density)};
}

constexpr size_t kMessageAlignment = 64;
constexpr size_t kLongest = size_t{1} << 48;  // elements; sizes in bytes can't overflow

void transcode_buffers(int codec, size_t count, const std::vector<py::buffer>& raw,
                       const std::vector<py::buffer>& encoded, float scale, const std::optional<py::buffer>& residual,
                       const std::optional<py::buffer>& message, const std::vector<py::buffer>& decoded, int density) {
  if (count > kLongest) throw py::value_error("count is too large");
  PythonBuffers held;
  Transcode work;
  work.encoding = encoding_of(codec, density);
  const size_t bytes = encoded_bytes(work.encoding, count);
  for (const py::buffer& buffer : raw) work.raw.push_back(held.floats(buffer, count, false, "raw"));
  for (const py::buffer& buffer : encoded) {
    work.encoded.push_back(held.hold(buffer, bytes, kMessageAlignment, false, "encoded"));
  }
  for (const py::buffer& buffer : decoded) work.decoded.push_back(held.floats(buffer, count, true, "decoded"));
  if (residual) work.residual = held.floats(*residual, count, true, "residual");
  if (message) work.message = held.hold(*message, bytes, kMessageAlignment, true, "message");
  work.count = count;
  work.scale = scale;
  py::gil_scoped_release release;
  transcode(work);
}

}  // namespace

void bind_codec(py::module_* module) {
  py::dict codecs;
  for (int codec = 0; codec < kCodecs; ++codec) codecs[codec_name(static_cast<Codec>(codec))] = codec;
  module->attr("CODECS") = codecs;
  module->def(
      "encoded_bytes",
      [](int codec, size_t count, int density) {
        if (count > kLongest) throw py::value_error("count is too large");
        return encoded_bytes(encoding_of(codec, density), count);
      },
      py::arg("codec"), py::arg("count"), py::arg("density") = 0);
  module->def("transcode", &transcode_buffers, py::arg("codec"), py::arg("count"), py::kw_only(),
              py::arg("raw") = std::vector<py::buffer>{}, py::arg("encoded") = std::vector<py::buffer>{},
              py::arg("scale") = 1.0f, py::arg("residual") = py::none(), py::arg("message") = py::none(),
              py::arg("decoded") = std::vector<py::buffer>{}, py::arg("density") = 0);
}

}  // namespace bagua
