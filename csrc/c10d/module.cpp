// The Python module bagua_c10d_native: makes backends. The only file that uses pybind11; typed by __init__.pyi.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "c10d/backend.h"
#include "c10d/kept_blocks.h"

namespace py = pybind11;

namespace bagua::dist {

bool signalled() {
  if (!Py_IsInitialized()) return false;
  const py::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

void raise_signal() {
  const py::gil_scoped_acquire acquire;
  throw py::error_already_set();
}

namespace {

// Holds a Python object for code that knows no interpreter. It is not released after the interpreter's end.
std::shared_ptr<void> held(py::object object) {
  return {object.release().ptr(), [](void* kept) {
            if (!Py_IsInitialized()) return;
            const py::gil_scoped_acquire acquire;
            Py_DECREF(static_cast<PyObject*>(kept));
          }};
}

// Calls it, and gives its result as text. An exception is reported and dropped.
std::string text_of(const std::shared_ptr<void>& callable) {
  if (!Py_IsInitialized()) return "";
  const py::gil_scoped_acquire acquire;
  try {
    const py::object answer = py::reinterpret_borrow<py::object>(static_cast<PyObject*>(callable.get()))();
    return answer.is_none() ? "" : py::cast<std::string>(py::str(answer));
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("bagua.c10d");
    return "";
  }
}

class PyHost {
 public:
  PyHost(const py::object& rank, const py::function& describe) {
    const py::capsule capsule = rank.attr("host_api")();
    if (capsule.name() == nullptr || std::string(capsule.name()) != kHostApiCapsule) {
      throw py::value_error("rank is not a Rank of the core");
    }
    const HostApi api = *capsule.get_pointer<HostApi>();
    if (api.version != kHostApiVersion)
      throw py::value_error("the core is of another version: start again, both are built anew [BG507]");
    host = std::make_shared<Host>(api, held(rank), [words = held(describe)] { return text_of(words); });
  }

  std::shared_ptr<Host> host;
};

c10::intrusive_ptr<::c10d::Backend> make(const PyHost& host, int rank, int size, uint32_t comm, uint64_t generation,
                                         const std::chrono::milliseconds& timeout, py::object keeper,
                                         py::object shut_down, const std::vector<pid_t>& processes) {
  Seat seat{rank, size, comm, generation, held(std::move(keeper)), nullptr, processes};
  seat.shut_down = [callable = held(std::move(shut_down))] { text_of(callable); };
  return c10::make_intrusive<BaguaBackend>(host.host, std::move(seat), timeout);
}

bool set_timeout(const c10::intrusive_ptr<::c10d::Backend>& backend, const std::chrono::milliseconds& timeout) {
  auto* const ours = dynamic_cast<BaguaBackend*>(backend.get());
  if (ours != nullptr) ours->setTimeout(timeout);
  return ours != nullptr;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<PyHost>(module, "Host")
      .def(py::init<const py::object&, const py::function&>(), py::arg("rank"), py::arg("describe"));
  module.def("make", &make, py::arg("host"), py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("comm"),
             py::arg("generation"), py::arg("timeout"), py::arg("keeper"), py::arg("shut_down"), py::arg("processes"));
  module.def("set_timeout", &set_timeout, py::arg("backend"), py::arg("timeout"));
  module.def("allocations", &BaguaBackend::allocations);
  module.def("keep_blocks", &keep_blocks);
  module.def("block_bytes", [] {
    const BlockBytes bytes = block_bytes();
    return py::make_tuple(bytes.used, bytes.kept, bytes.most);
  });
  module.def("can_read", &can_read, py::arg("process"), py::arg("address"), py::arg("nonce"));
}

}  // namespace bagua::dist
