// The Python module bagua_core_native: thin, typed by ../../core.pyi.
//
// The interpreter lock is released around everything that waits or moves data. Errors of the core become CoreError.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "base/crc32c.h"
#include "base/scarcity.h"
#include "base/spawn.h"
#include "base/wire_version.h"
#include "bindings/python_buffer.h"
#include "bindings/python_errors.h"
#include "channel/layout.h"
#include "kernel/reduce.h"

namespace py = pybind11;

namespace bagua {

void bind_engine(py::module_* module);    // engine_module.cpp
void bind_rank(py::module_* module);      // rank_module.cpp
void bind_codec(py::module_* module);     // codec.cpp
void bind_low_rank(py::module_* module);  // low_rank_module.cpp

namespace {

// (uid, gid, groups, umask, limits: (resource, soft, hard) each; -1 is no limit)
using UserTuple = std::tuple<uid_t, gid_t, std::vector<gid_t>, mode_t, std::vector<std::tuple<int, int64_t, int64_t>>>;

SpawnUser spawn_user(const UserTuple& given) {
  const auto& [uid, gid, groups, umask, limits] = given;
  SpawnUser user{uid, gid, groups, umask, {}};
  for (const auto& [resource, soft, hard] : limits) {
    user.limits.push_back({resource, static_cast<uint64_t>(soft), static_cast<uint64_t>(hard)});
  }
  return user;
}

int start_process(const std::vector<std::string>& argv, const std::map<std::string, std::string>& env,
                  const std::string& cwd, int stdout_fd, int stderr_fd, int death_signal,
                  const std::optional<UserTuple>& user) {
  SpawnRequest request;
  request.argv = argv;
  for (const auto& [name, value] : env) request.env.push_back(name + "=" + value);
  request.cwd = cwd;
  request.stdout_fd = stdout_fd;
  request.stderr_fd = stderr_fd;
  request.death_signal = death_signal;
  if (user) request.user = spawn_user(*user);
  pid_t pid = -1;
  int error = 0;
  Status status;
  {
    py::gil_scoped_release release;
    status = spawn(request, &pid, &error);
  }
  if (!status) {
    // OSError picks the subclass (FileNotFoundError, PermissionError) by the number.
    PyErr_SetObject(PyExc_OSError, py::make_tuple(error, text(status.message())).ptr());
    throw py::error_already_set();
  }
  return pid;
}

void reduce_buffers(int dtype, int op, const std::vector<py::buffer>& inputs, const py::buffer& output, size_t count,
                    int64_t scale) {
  if (dtype < 0 || dtype >= kDTypes || op < 0 || op > 255 || !op_known(static_cast<uint8_t>(op)) ||
      !op_supported(static_cast<DType>(dtype), static_cast<ReduceOp>(op))) {
    throw py::value_error("this reduction of this dtype is not supported");
  }
  const DType type = static_cast<DType>(dtype);
  const size_t bytes = count * dtype_size(type);
  PythonBuffers held;
  std::vector<const void*> sources;
  for (const py::buffer& input : inputs) sources.push_back(held.hold(input, bytes, dtype_size(type), false, "inputs"));
  if (sources.empty()) throw py::value_error("at least one input is needed");
  void* target = held.hold(output, bytes, dtype_size(type), true, "output");
  py::gil_scoped_release release;
  reduce(type, static_cast<ReduceOp>(op), sources.data(), static_cast<int>(sources.size()), &target, 1, count, scale,
         false);
}

// Called with each SystemExit that is made by its own constructor. The interpreter ends by one without telling anybody
// its code before functions of atexit run; there is no hook of Python for it.
PyObject* exit_callback = nullptr;
initproc make_exit = nullptr;

int make_exit_and_tell(PyObject* self, PyObject* args, PyObject* kwargs) {
  const int result = make_exit(self, args, kwargs);
  if (result != 0 || exit_callback == nullptr) return result;
  PyObject* const done = PyObject_CallFunctionObjArgs(exit_callback, self, nullptr);
  if (done == nullptr) PyErr_WriteUnraisable(exit_callback);
  Py_XDECREF(done);
  return result;
}

void on_system_exit(const py::object& callback) {
  PyObject* const before = exit_callback;
  exit_callback = callback.is_none() ? nullptr : callback.inc_ref().ptr();
  Py_XDECREF(before);
  auto* const type = reinterpret_cast<PyTypeObject*>(PyExc_SystemExit);
  if (make_exit == nullptr) {
    make_exit = type->tp_init;
    type->tp_init = &make_exit_and_tell;
  }
}

void bind_functions(py::module_* module) {
  module->def("spawn", &start_process, py::arg("argv"), py::arg("env"), py::arg("cwd"), py::arg("stdout_fd"),
              py::arg("stderr_fd"), py::arg("death_signal") = 9, py::arg("user") = std::optional<UserTuple>());
  module->def("reduce", &reduce_buffers, py::arg("dtype"), py::arg("op"), py::arg("inputs"), py::arg("output"),
              py::arg("count"), py::arg("scale") = 1);
  module->def(
      "crc32c",
      [](const py::buffer& data, uint32_t seed) {
        const py::buffer_info info = data.request();
        return crc32c(info.ptr, static_cast<size_t>(info.size * info.itemsize), seed);
      },
      py::arg("data"), py::arg("seed") = 0);
  module->def("set_wire_version", [](uint32_t number) { wire_version = number; }, py::arg("number"));
  module->def("on_system_exit", &on_system_exit, py::arg("callback"));
}

void bind_names(py::module_* module) {
  py::dict kinds, dtypes, ops;
  for (int kind = 0; kind < kKinds; ++kind) kinds[kind_name(static_cast<Kind>(kind))] = kind;
  for (int dtype = 0; dtype < kDTypes; ++dtype) dtypes[dtype_name(static_cast<DType>(dtype))] = dtype;
  for (uint8_t op = 0; op <= 10; ++op) {
    if (op_known(op)) ops[op_name(static_cast<ReduceOp>(op))] = op;
  }
  module->attr("KINDS") = kinds;
  module->attr("DTYPES") = dtypes;
  module->attr("OPS") = ops;
}

}  // namespace
}  // namespace bagua

PYBIND11_MODULE(bagua_core_native, module) {
  module.doc() = "The native core of Bagua; see csrc/core.pyi.";
  static py::exception<bagua::CoreError> core_error(module, "CoreError", PyExc_RuntimeError);
  static py::exception<bagua::Regrouped> regrouped(module, "Regrouped", core_error.ptr());
  static py::exception<bagua::Dismissed> dismissed(module, "Dismissed", core_error.ptr());
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const bagua::Regrouped& error) {
      PyErr_SetObject(regrouped.ptr(), bagua::text(error.what()).ptr());
    } catch (const bagua::Dismissed& error) {
      PyErr_SetObject(dismissed.ptr(), bagua::text(error.what()).ptr());
    } catch (const bagua::CoreError& error) {
      PyErr_SetObject(core_error.ptr(), bagua::text(error.what()).ptr());
    } catch (const std::system_error& error) {  // of std::thread
      if (error.code() != std::errc::resource_unavailable_try_again) throw;
      PyErr_SetObject(core_error.ptr(),
                      bagua::text(bagua::coded({bagua::Code::kResource, bagua::no_thread_text()})).ptr());
    }
  });
  bagua::bind_names(&module);
  bagua::bind_engine(&module);
  bagua::bind_rank(&module);
  bagua::bind_functions(&module);
  bagua::bind_codec(&module);
  bagua::bind_low_rank(&module);
}
