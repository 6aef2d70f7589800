// The Python module bagua_device_native: a thin binding, typed by __init__.pyi, and the only file that uses pybind11.
//
// It releases the interpreter lock around calls that take locks or call CUDA. Errors become DeviceError.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/clock.h"
#include "gpu/leg/leg.h"

namespace py = pybind11;

namespace bagua::device {
namespace {

struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check(const Status& status) {
  if (status) return;
  const bool has_code = status.message().find(" [BG") != std::string::npos;  // of the core
  throw DeviceError(has_code ? status.message() : status.message() + " [BG510]");
}

py::str text(const std::string& bytes) {
  PyObject* decoded = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

py::dict describe(const Libraries& libraries) {
  py::dict found, why_not;
  for (const char* name : {"cudart", "driver", "nccl", "kernels"}) {
    const auto path = libraries.paths.find(name);
    found[name] = path == libraries.paths.end() ? "" : path->second;
    const auto why = libraries.why_not.find(name);
    if (why != libraries.why_not.end()) why_not[name] = text(why->second);
  }
  found["nccl_version"] = libraries.has_nccl() ? libraries.nccl_version : 0;
  found["stream_wait_value"] = libraries.has_wait_value();
  found["comm_split"] = libraries.nccl.split != nullptr;
  found["why_not"] = why_not;
  return found;
}

py::dict reasons(const std::map<Route, std::string>& excluded) {
  py::dict found;
  for (const auto& [route, reason] : excluded) found[route_name(route)] = text(reason);
  return found;
}

// Keeps the core's Rank alive, because it uses the Rank's channel.
class PyLeg {
 public:
  PyLeg(py::object rank, int device, std::vector<std::vector<int>> hosts, int me, std::string route,
        std::string kernels, bool world, bool blocking)
      : rank_(std::move(rank)) {
    const py::capsule capsule = rank_.attr("host_api")();
    if (capsule.name() == nullptr || std::string(capsule.name()) != kHostApiCapsule) {
      throw DeviceError("rank is not a Rank of the core");
    }
    const HostApi host = *capsule.get_pointer<HostApi>();
    py::gil_scoped_release release;
    check(Leg::create(host, {device, std::move(hosts), me, std::move(route), std::move(kernels), world, blocking},
                      &leg_));
  }
  ~PyLeg() {
    py::gil_scoped_release release;
    leg_.reset();
  }

  uint64_t submit(uint32_t comm, int kind, int dtype, int op, uint64_t count, int root, uintptr_t src, uintptr_t dst,
                  const std::vector<int64_t>& shape, const std::string& label, int codec, int64_t density,
                  uint32_t residual, uint32_t exact, uintptr_t stream) {
    if (density < 0 || density > UINT16_MAX) throw py::value_error("density must be 0 to 65535 (of 65536)");
    Descriptor d{};
    d.kind = static_cast<uint8_t>(std::clamp(kind, 0, 255));
    d.dtype = static_cast<uint8_t>(std::clamp(dtype, 0, 255));
    d.op = static_cast<uint8_t>(std::clamp(op, 0, 255));
    d.comm = comm;
    d.count = count;
    d.root = root;
    if (shape.size() <= kMaxDims) {
      d.ndim = static_cast<uint8_t>(shape.size());
      std::copy(shape.begin(), shape.end(), d.dims);
    }
    label.copy(d.label, kLabelBytes - 1);
    d.codec = static_cast<uint8_t>(std::clamp(codec, 0, 255));
    d.density = static_cast<uint16_t>(density);
    d.residual = residual;
    d.exact = exact;
    uint64_t ticket = 0;
    {
      py::gil_scoped_release release;
      check(leg_->submit(d, reinterpret_cast<const void*>(src), reinterpret_cast<void*>(dst),
                         reinterpret_cast<CudaStream>(stream), &ticket));
    }
    return ticket;
  }

  py::tuple waiting() {
    Waiting found;
    {
      py::gil_scoped_release release;
      found = leg_->waiting();
    }
    const double seconds = found.since_ns == 0 ? 0.0 : static_cast<double>(now_ns() - found.since_ns) / kNsPerS;
    return py::make_tuple(seconds, text(found.what));
  }

  void transcode(int codec, uint64_t count, const std::vector<uintptr_t>& raw, const std::vector<uintptr_t>& encoded,
                 float scale, uintptr_t residual, uintptr_t message, const std::vector<uintptr_t>& decoded, int density,
                 uintptr_t stream) {
    if (raw.size() + encoded.size() > BAGUA_KERNELS_MOST_INPUTS || raw.size() + encoded.size() == 0) {
      throw py::value_error("raw and encoded must be 1 to " + std::to_string(BAGUA_KERNELS_MOST_INPUTS) + " together");
    }
    if (decoded.size() > 4) throw py::value_error("at most 4 decoded");
    if (codec < 0 || codec > 8 || density < 0 || density > UINT16_MAX || (codec == 8) != (density != 0)) {
      throw py::value_error("unknown codec, or a density that does not fit it");
    }
    BaguaTranscode work{};
    work.codec = static_cast<uint8_t>(codec);
    work.density = static_cast<uint16_t>(density);
    work.count = count;
    work.raw = reinterpret_cast<const float* const*>(raw.data());
    work.raws = static_cast<int32_t>(raw.size());
    work.encoded = reinterpret_cast<const void* const*>(encoded.data());
    work.encodeds = static_cast<int32_t>(encoded.size());
    work.scale = scale;
    work.residual = reinterpret_cast<float*>(residual);
    work.message = reinterpret_cast<void*>(message);
    work.decoded = reinterpret_cast<float* const*>(decoded.data());
    work.decodeds = static_cast<int32_t>(decoded.size());
    py::gil_scoped_release release;
    check(leg_->transcode(work, reinterpret_cast<CudaStream>(stream)));
  }

  py::dict counters() const {
    const LegCounters& c = leg_->runtime().counters;
    py::dict values;
    values["ops"] = c.ops.load();
    values["ops_staged"] = c.ops_staged.load();
    values["ops_flat"] = c.ops_flat.load();
    values["ops_hierarchical"] = c.ops_hierarchical.load();
    values["bytes"] = c.bytes.load();
    values["pinned_bytes"] = c.pinned_bytes.load();
    values["scratch_bytes"] = c.scratch_bytes.load();
    values["residual_bytes"] = c.residual_bytes.load();
    values["in_flight"] = c.in_flight.load();
    values["aborts"] = c.aborts.load();
    values["blocking_groups"] = c.blocking_groups.load();
    values["host_waits"] = c.host_waits.load();
    return values;
  }

  Leg& leg() const { return *leg_; }

 private:
  py::object rank_;
  std::unique_ptr<Leg> leg_;
};

void bind_leg(py::module_* module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  const auto stream_of = [](uintptr_t stream) { return reinterpret_cast<CudaStream>(stream); };
  py::class_<PyLeg>(*module, "Leg")
      .def(py::init<py::object, int, std::vector<std::vector<int>>, int, std::string, std::string, bool, bool>(),
           py::kw_only(), py::arg("rank"), py::arg("device"), py::arg("hosts"), py::arg("me"), py::arg("route") = "",
           py::arg("kernels") = "", py::arg("world") = true, py::arg("blocking") = true)
      .def(
          "create_comm",
          [](PyLeg& self, uint32_t comm, std::vector<int> ranks) {
            check(self.leg().create_comm(comm, std::move(ranks)));
          },
          py::arg("comm"), py::arg("ranks"), Release())
      .def(
          "destroy_comm", [](PyLeg& self, uint32_t comm) { check(self.leg().destroy_comm(comm)); }, py::arg("comm"),
          Release())
      .def(
          "report",
          [](PyLeg& self, uint32_t comm) {
            Route route = Route::kStaged;
            Excluded excluded;
            check(self.leg().route(comm, &route, &excluded));
            py::dict found;
            found["route"] = route_name(route);
            found["impossible"] = reasons(excluded.impossible);
            found["failed"] = reasons(excluded.failed);
            found["undivided"] = text(excluded.undivided);
            return found;
          },
          py::arg("comm"))
      .def("submit", &PyLeg::submit, py::kw_only(), py::arg("comm"), py::arg("kind"), py::arg("dtype"),
           py::arg("op") = 0, py::arg("count"), py::arg("root") = -1, py::arg("src") = 0, py::arg("dst") = 0,
           py::arg("shape") = std::vector<int64_t>{}, py::arg("label") = "", py::arg("codec") = 0,
           py::arg("density") = 0, py::arg("residual") = 0, py::arg("exact") = 0, py::arg("stream"))
      .def(
          "done",
          [](PyLeg& self, uint64_t ticket) {
            bool done = false;
            check(self.leg().done(ticket, &done));
            return done;
          },
          py::arg("ticket"), Release())
      .def(
          "wait",
          [stream_of](PyLeg& self, uint64_t ticket, uintptr_t stream) {
            check(self.leg().wait(ticket, stream_of(stream)));
          },
          py::arg("ticket"), py::arg("stream"), Release())
      .def(
          "release", [](PyLeg& self, uint64_t ticket) { self.leg().release(ticket); }, py::arg("ticket"), Release())
      .def(
          "times",
          [](PyLeg& self, uint64_t ticket) {
            Times times;
            check(self.leg().times(ticket, &times));
            return std::make_tuple(times.submitted_ns, times.started_ns, times.done_ns);
          },
          py::arg("ticket"), Release())
      .def("waiting", &PyLeg::waiting)
      .def("transcode", &PyLeg::transcode, py::arg("codec"), py::arg("count"), py::kw_only(),
           py::arg("raw") = std::vector<uintptr_t>{}, py::arg("encoded") = std::vector<uintptr_t>{},
           py::arg("scale") = 1.0f, py::arg("residual") = 0, py::arg("message") = 0,
           py::arg("decoded") = std::vector<uintptr_t>{}, py::arg("density") = 0, py::arg("stream"))
      .def(
          "abort", [](PyLeg& self, const std::string& reason) { self.leg().abort(reason); }, py::arg("reason"),
          Release())
      .def("error", [](PyLeg& self) { return text(self.leg().error()); })
      .def("capabilities", [](PyLeg& self) { return describe(self.leg().runtime().libraries); })
      .def("counters", &PyLeg::counters)
      .def("close", [](PyLeg& self) { self.leg().close(); }, Release());
}

}  // namespace
}  // namespace bagua::device

PYBIND11_MODULE(bagua_device_native, module) {
  using namespace bagua::device;
  module.doc() = "The GPU leg of Bagua's core; see csrc/gpu/leg/__init__.pyi.";
  static py::exception<DeviceError> device_error(module, "DeviceError", PyExc_RuntimeError);
  py::register_local_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const DeviceError& error) {
      PyErr_SetObject(device_error.ptr(), text(error.what()).ptr());
    }
  });
  bind_leg(&module);
  module.def("libraries", [] { return describe(open_libraries("")); });
}
