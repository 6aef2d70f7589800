// Binds the kernels of kernel/low_rank.h to Python, for algorithms; typed by ../../core.pyi.
#include <pybind11/pybind11.h>

#include "bindings/python_buffer.h"
#include "kernel/low_rank.h"

namespace py = pybind11;

namespace bagua {
namespace {

LowRank shape_of(size_t rows, size_t columns, size_t rank) {
  constexpr size_t kMost = size_t{1} << 31;
  if (rows > kMost || columns > kMost || rank > kMost)
    throw py::value_error("a matrix has at most 2^31 rows and columns");
  if (rank == 0) throw py::value_error("rank is 0: it must be at least 1");
  return {rows, columns, rank};
}

void project(size_t rows, size_t columns, size_t rank, const py::buffer& memory, const py::buffer& gradient,
             const py::buffer& left, const py::buffer& right, const py::buffer& projected) {
  const LowRank shape = shape_of(rows, columns, rank);
  PythonBuffers held;
  float* const matrix = held.floats(memory, rows * columns, true, "memory");
  const float* const added = held.floats(gradient, rows * columns, false, "gradient");
  const float* const p = held.floats(left, rank * rows, false, "left");
  const float* const q = held.floats(right, rank * columns, false, "right");
  float* const out = held.floats(projected, rank * rows, true, "projected");
  py::gil_scoped_release release;
  low_rank_project(shape, matrix, added, p, q, out);
}

void back_project(size_t rows, size_t columns, size_t rank, const py::buffer& memory, const py::buffer& left,
                  const py::buffer& right) {
  const LowRank shape = shape_of(rows, columns, rank);
  PythonBuffers held;
  const float* const matrix = held.floats(memory, rows * columns, false, "memory");
  const float* const p = held.floats(left, rank * rows, false, "left");
  float* const out = held.floats(right, rank * columns, true, "right");
  py::gil_scoped_release release;
  low_rank_back_project(shape, matrix, p, out);
}

void product(size_t rows, size_t columns, size_t rank, const py::buffer& left, const py::buffer& right,
             const py::buffer& result) {
  const LowRank shape = shape_of(rows, columns, rank);
  PythonBuffers held;
  const float* const p = held.floats(left, rank * rows, false, "left");
  const float* const q = held.floats(right, rank * columns, false, "right");
  float* const out = held.floats(result, rows * columns, true, "result");
  py::gil_scoped_release release;
  low_rank_product(shape, p, q, out);
}

}  // namespace

void bind_low_rank(py::module_* module) {
  module->def("low_rank_project", &project, py::arg("rows"), py::arg("columns"), py::arg("rank"), py::kw_only(),
              py::arg("memory"), py::arg("gradient"), py::arg("left"), py::arg("right"), py::arg("projected"));
  module->def("low_rank_back_project", &back_project, py::arg("rows"), py::arg("columns"), py::arg("rank"),
              py::kw_only(), py::arg("memory"), py::arg("left"), py::arg("right"));
  module->def("low_rank_product", &product, py::arg("rows"), py::arg("columns"), py::arg("rank"), py::kw_only(),
              py::arg("left"), py::arg("right"), py::arg("result"));
}

}  // namespace bagua
