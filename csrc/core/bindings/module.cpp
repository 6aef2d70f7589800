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
#include <tuple>
#include <vector>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/sha256.h"
#include "base/spawn.h"
#include "channel/client.h"
#include "channel/host_api.h"
#include "channel/layout.h"
#include "channel/transfer.h"
#include "engine/engine.h"
#include "kernel/reduce.h"

namespace py = pybind11;

namespace bagua {

void bind_codec(py::module_* module);     // codec.cpp
void bind_low_rank(py::module_* module);  // low_rank_module.cpp

namespace {

struct CoreError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The generation has ended, and the job has not.
struct Regrouped : CoreError {
  using CoreError::CoreError;
};

// The job goes on without this process, as was planned.
struct Dismissed : CoreError {
  using CoreError::CoreError;
};

void check(const Status& status) {
  if (status.code() == Code::kDismissed) throw Dismissed(status.message());
  if (status.code() == Code::kRegrouped) throw Regrouped(status.message());
  if (!status) throw CoreError(status.message());
}

// Text that came from other processes need not be UTF-8.
py::str text(const std::string& bytes) {
  PyObject* decoded = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

int64_t seconds(double s) {
  if (s < 0) return -1;
  return s > 1e9 ? int64_t{1'000'000'000} * 1'000'000'000 : static_cast<int64_t>(s * 1e9);
}

int64_t deadline_after(double s) {
  return s < 0 ? -1 : now_ns() + seconds(s);
}

py::dict counters_dict(const Counters& counters) {
  py::dict values;
  values["bytes_local"] = counters.bytes_local.load();
  values["bytes_sent"] = counters.bytes_sent.load();
  values["bytes_received"] = counters.bytes_received.load();
  values["ops"] = counters.ops.load();
  values["frames_dropped"] = counters.frames_dropped.load();
  values["bad_connections"] = counters.bad_connections.load();
  values["segment_bytes"] = counters.segment_bytes.load();
  values["comm_ns"] = counters.comm_ns.load();
  values["residual_bytes"] = counters.residual_bytes.load();
  values["zero_copy_bytes"] = counters.zero_copy_bytes.load();
  values["zero_copy_off"] = counters.zero_copy_off.load();
  values["bytes_encrypted"] = counters.bytes_encrypted.load();
  values["frames_refused"] = counters.frames_refused.load();
  return values;
}

Encryption encryption_of(const std::string& name) {
  if (name == "beyond loopback") return Encryption::kBeyondLoopback;
  if (name == "always") return Encryption::kAlways;
  if (name == "never") return Encryption::kNever;
  throw py::value_error("encryption must be 'beyond loopback', 'always' or 'never'");
}

Tokens tokens_of(const std::map<int, py::bytes>& tokens) {
  Tokens all;
  for (const auto& [member, token] : tokens) {
    const std::string bytes = token;
    all.emplace_back(member, std::vector<uint8_t>(bytes.begin(), bytes.end()));
  }
  return all;
}

using Members = std::optional<std::vector<int>>;

std::unique_ptr<Engine> make_engine(std::string job_id, uint64_t generation, int host_index,
                                    std::vector<std::vector<int>> hosts, std::string data_socket,
                                    const std::map<int, py::bytes>& tokens, const std::string& job_key,
                                    std::string listen, int streams, int64_t chunk_bytes, int threads,
                                    double connect_timeout_s, uint64_t memory_limit, double peer_timeout_s,
                                    bool measure_ring, bool zero_copy, const std::string& encryption, Members members,
                                    bool elastic, bool newcomers, int memory) {
  EngineOptions options;
  options.credentials.job_id = std::move(job_id);
  Membership membership{generation, host_index, std::move(hosts), std::move(members).value_or(std::vector<int>()),
                        newcomers};
  options.data_socket = std::move(data_socket);
  options.tokens = tokens_of(tokens);
  options.elastic = elastic;
  options.memory = memory;
  JobKey& key = options.credentials.key;
  if (job_key.size() != key.size()) throw py::value_error("job_key must have 32 bytes");
  std::copy(job_key.begin(), job_key.end(), key.begin());
  options.credentials.encryption = encryption_of(encryption);
  options.listen = std::move(listen);
  options.streams = streams;
  if (chunk_bytes < 0) throw py::value_error("chunk_bytes must be positive");
  options.chunk_bytes = static_cast<size_t>(chunk_bytes);
  options.threads = threads;
  options.memory_limit = memory_limit;
  options.zero_copy = zero_copy;
  options.connect_timeout_ns = std::max<int64_t>(0, seconds(connect_timeout_s));
  options.peer_timeout_ns = std::max<int64_t>(kNsPerMs, seconds(peer_timeout_s));
  options.measure_ring = measure_ring;
  std::unique_ptr<Engine> engine;
  py::gil_scoped_release release;
  check(Engine::create(std::move(options), std::move(membership), &engine));
  return engine;
}

void regroup(Engine* engine, uint64_t generation, int host_index, std::vector<std::vector<int>> hosts, Members members,
             const std::map<int, py::bytes>& tokens) {
  Membership next{generation, host_index, std::move(hosts), std::move(members).value_or(std::vector<int>())};
  const Tokens shown = tokens_of(tokens);
  Status status;
  {
    py::gil_scoped_release release;
    status = engine->regroup(std::move(next), shown);
  }
  check(status);
}

void plan(Engine* engine, uint64_t generation, int host_index, std::vector<std::vector<int>> hosts, Members members,
          std::vector<std::string> peers, bool hold) {
  Plan next;
  next.here = host_index >= 0;
  next.hold = hold;
  next.next = {generation, host_index, std::move(hosts), std::move(members).value_or(std::vector<int>())};
  next.peers = std::move(peers);
  Status status;
  {
    py::gil_scoped_release release;
    status = engine->plan(std::move(next));
  }
  check(status);
}

void open_lobby(Engine* engine, const std::vector<int>& members, const std::map<int, py::bytes>& tokens) {
  const Tokens shown = tokens_of(tokens);
  Status status;
  {
    py::gil_scoped_release release;
    status = engine->open_lobby(members, shown);
  }
  check(status);
}

py::list take_events(Engine* engine) {
  py::list events;
  for (const Event& event : engine->events()) {
    py::dict entry;
    entry["kind"] = event.kind;
    entry["rank"] = event.rank;
    if (std::string(event.kind) == "suspended") entry["host"] = event.host;
    if (event.generation > 0) entry["generation"] = event.generation;
    entry["text"] = text(event.text);
    events.append(entry);
  }
  return events;
}

void bind_engine(py::module_* module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Engine>(*module, "Engine")
      .def(py::init(&make_engine), py::kw_only(), py::arg("job_id"), py::arg("generation"), py::arg("host_index"),
           py::arg("hosts"), py::arg("data_socket"), py::arg("tokens"), py::arg("job_key"), py::arg("listen"),
           py::arg("streams") = 4, py::arg("chunk_bytes") = 524288, py::arg("threads") = 0,
           py::arg("connect_timeout_s") = 30.0, py::arg("memory_limit") = 0, py::arg("peer_timeout_s") = 30.0,
           py::arg("measure_ring") = true, py::arg("zero_copy") = false, py::arg("encryption") = "beyond loopback",
           py::arg("members") = Members(), py::arg("elastic") = false, py::arg("newcomers") = false,
           py::arg("memory") = -1)
      .def("open_lobby", &open_lobby, py::kw_only(), py::arg("members"), py::arg("tokens"))
      .def("plan", &plan, py::kw_only(), py::arg("generation"), py::arg("host_index") = 0,
           py::arg("hosts") = std::vector<std::vector<int>>{}, py::arg("members") = Members(),
           py::arg("peers") = std::vector<std::string>{}, py::arg("hold") = false)
      .def("regroup", &regroup, py::kw_only(), py::arg("generation"), py::arg("host_index"), py::arg("hosts"),
           py::arg("members") = Members(), py::arg("tokens") = std::map<int, py::bytes>{})
      .def("address", &Engine::address)
      .def(
          "set_peers", [](Engine& engine, const std::vector<std::string>& peers) { check(engine.set_peers(peers)); },
          py::arg("addresses"), Release())
      .def("event_fd", &Engine::event_fd)
      .def("events", &take_events)
      .def("error", [](Engine& engine) { return text(engine.error()); })
      .def(
          "waiting",
          [](Engine& engine, double longer_than_s) {
            std::string lines;
            {
              py::gil_scoped_release release;
              lines = engine.waiting(std::max<int64_t>(0, seconds(longer_than_s)));
            }
            return text(lines);
          },
          py::arg("longer_than_s"))
      .def("step_s", [](Engine& engine) { return static_cast<double>(engine.step_ns()) / 1e9; })
      .def("abort", &Engine::abort, py::arg("reason"), Release())
      .def("stats", [](Engine& engine) { return counters_dict(engine.counters()); })
      .def("close", &Engine::close, Release());
}

struct Segment {
  uint64_t id;
  std::shared_ptr<Mapping> memory;
};

void bind_segment(py::module_* module) {
  py::class_<Segment>(*module, "Segment", py::buffer_protocol())
      .def_property_readonly("id", [](const Segment& segment) { return segment.id; })
      .def_property_readonly("nbytes", [](const Segment& segment) { return segment.memory->bytes(); })
      .def_property_readonly("address",
                             [](const Segment& segment) { return reinterpret_cast<uintptr_t>(segment.memory->data()); })
      .def_buffer([](Segment& segment) {
        // Every view holds a reference to the Segment, so to the mapping.
        return py::buffer_info(segment.memory->data(), 1, py::format_descriptor<uint8_t>::format(),
                               static_cast<py::ssize_t>(segment.memory->bytes()), false);
      });
}

// True once a signal's handler has raised; called without the interpreter lock.
bool signalled() {
  py::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

// A transfer that takes long.
struct PendingTransfer {
  std::unique_ptr<Transfer> transfer;
  ~PendingTransfer() {
    py::gil_scoped_release release;
    transfer.reset();  // may talk to the daemon
  }

  bool run(double timeout_s) {
    Status status;
    {
      py::gil_scoped_release release;
      status = transfer->run(deadline_after(timeout_s), &signalled);
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();  // KeyboardInterrupt, or what a handler raised
    if (status.code() == Code::kTimeout) return false;
    check(status);
    return true;
  }
};

// The client, and what it needs of Python.
class Rank {
 public:
  Rank(const std::string& socket, const std::string& token, int member, double timeout_s) {
    if (token.size() != kTokenBytes) throw py::value_error("token must have 32 bytes");
    py::gil_scoped_release release;
    check(ChannelClient::connect(socket, reinterpret_cast<const uint8_t*>(token.data()), member, seconds(timeout_s),
                                 &client_));
    stages_ = std::make_unique<StagePool>(client_.get());
    host_api_ = bagua::host_api(client_.get());
  }
  ~Rank() {
    py::gil_scoped_release release;
    stages_.reset();
    client_.reset();
  }

  Segment alloc(uint64_t bytes) {
    ChannelClient::Allocation allocation;
    py::gil_scoped_release release;
    check(client_->alloc(bytes, &allocation));
    return {allocation.id, std::move(allocation.memory)};
  }

  uint64_t submit(uint32_t comm, int kind, int dtype, int op, uint64_t count, int root,
                  const std::tuple<uint32_t, uint64_t>& src, const std::tuple<uint32_t, uint64_t>& dst,
                  const std::vector<int64_t>& shape, const std::string& label, int codec, int64_t density,
                  uint32_t residual, uint32_t exact, int residual_sides, bool fenced, uint16_t chunk_kib,
                  uint64_t generation) {
    if (density < 0 || density > UINT16_MAX) throw py::value_error("density must be 0 to 65535 (of 65536)");
    Descriptor descriptor{};
    descriptor.kind = static_cast<uint8_t>(std::clamp(kind, 0, 255));
    descriptor.dtype = static_cast<uint8_t>(std::clamp(dtype, 0, 255));
    descriptor.op = static_cast<uint8_t>(std::clamp(op, 0, 255));
    descriptor.comm = comm;
    descriptor.count = count;
    descriptor.root = root;
    std::tie(descriptor.src_segment, descriptor.src_offset) = src;
    std::tie(descriptor.dst_segment, descriptor.dst_offset) = dst;
    if (shape.size() <= kMaxDims) {
      descriptor.ndim = static_cast<uint8_t>(shape.size());
      std::copy(shape.begin(), shape.end(), descriptor.dims);
    }
    label.copy(descriptor.label, kLabelBytes - 1);
    descriptor.codec = static_cast<uint8_t>(std::clamp(codec, 0, 255));
    descriptor.density = static_cast<uint16_t>(density);
    descriptor.residual = residual;
    descriptor.exact = exact;
    descriptor.residual_sides = static_cast<uint8_t>(std::clamp(residual_sides, 0, 255));
    descriptor.fenced = fenced ? 1 : 0;
    descriptor.chunk_kib = chunk_kib;
    uint64_t ticket = 0;
    ChannelClient::Submission how;
    how.generation = generation;
    check(client_->submit(descriptor, &ticket, how));
    return ticket;
  }

  // One operation on tensors at any address; nullptr: it is over.
  std::unique_ptr<PendingTransfer> transfer(uint32_t comm, uint8_t kind, uint8_t dtype, uint8_t op, int root,
                                            uint64_t count, uintptr_t src, uint64_t src_rows, uintptr_t dst,
                                            uint64_t dst_rows, bool together, const std::vector<int64_t>& shape,
                                            uint8_t codec, uint16_t density, double timeout_s, uint64_t generation) {
    if (dtype >= kDTypes) throw py::value_error("unknown dtype");
    TransferRequest request;
    request.descriptor.kind = kind;
    request.descriptor.dtype = dtype;
    request.descriptor.op = op;
    request.descriptor.comm = comm;
    request.descriptor.count = count;
    request.descriptor.root = root;
    request.descriptor.codec = codec;
    request.descriptor.density = density;
    if (shape.size() <= kMaxDims) {
      request.descriptor.ndim = static_cast<uint8_t>(shape.size());
      std::copy(shape.begin(), shape.end(), request.descriptor.dims);
    }
    request.src = reinterpret_cast<const char*>(src);
    request.src_rows = src_rows;
    request.dst = reinterpret_cast<char*>(dst);
    request.dst_rows = dst_rows;
    request.together = together;
    request.generation = generation;
    auto pending = std::make_unique<PendingTransfer>();
    pending->transfer = std::make_unique<Transfer>(client_.get(), stages_.get(), request);
    return pending->run(timeout_s) ? nullptr : std::move(pending);
  }

  bool done(uint64_t ticket) {
    bool done = false;
    check(client_->done(ticket, &done));
    return done;
  }

  std::optional<std::tuple<int64_t, int64_t, int64_t>> wait(uint64_t ticket, double timeout_s) {
    ChannelClient::Times times;
    Status status;
    {
      py::gil_scoped_release release;
      status = client_->wait(ticket, deadline_after(timeout_s), &signalled, &times);
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();  // KeyboardInterrupt, or what a handler raised
    if (status.code() == Code::kTimeout) return std::nullopt;
    check(status);
    return std::make_tuple(times.submitted_ns, times.started_ns, times.done_ns);
  }

  py::dict view() {
    const GenerationView view = client_->view();
    py::dict entry;
    entry["generation"] = view.generation;
    entry["rank"] = view.rank;
    entry["hosts"] = view.hosts;
    entry["members"] = view.members;
    entry["elastic"] = view.elastic;
    entry["newcomer"] = view.newcomer;
    return entry;
  }

  std::optional<py::dict> enter(double timeout_s) {
    Status status;
    {
      py::gil_scoped_release release;
      status = client_->enter(deadline_after(timeout_s), &signalled);
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();  // KeyboardInterrupt, or what a handler raised
    if (status.code() == Code::kTimeout) return std::nullopt;
    check(status);
    return view();
  }

  ChannelClient& client() { return *client_; }
  // For the GPU leg, which keeps this object alive.
  py::capsule host_api() { return py::capsule(&host_api_, kHostApiCapsule); }

 private:
  std::unique_ptr<ChannelClient> client_;
  HostApi host_api_{};
  std::unique_ptr<StagePool> stages_;
};

void bind_rank(py::module_* module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  const std::tuple<uint32_t, uint64_t> nowhere{0, 0};
  py::class_<PendingTransfer>(*module, "PendingTransfer").def("wait", &PendingTransfer::run, py::arg("timeout_s"));
  py::class_<Rank>(*module, "Rank")
      .def(py::init([](const std::string& data_socket, const py::bytes& token, int rank, double timeout_s) {
             return std::make_unique<Rank>(data_socket, token, rank, timeout_s);
           }),
           py::kw_only(), py::arg("data_socket"), py::arg("token"), py::arg("rank"), py::arg("timeout_s") = 30.0)
      .def(
          "require", [](Rank& rank, uint64_t nbytes) { check(rank.client().require(nbytes)); }, py::arg("nbytes"),
          Release())
      .def("alloc", &Rank::alloc, py::arg("nbytes"))
      .def(
          "free", [](Rank& rank, uint64_t id) { check(rank.client().free_segment(id)); }, py::arg("segment_id"),
          Release())
      .def(
          "create_comm",
          [](Rank& rank, uint32_t comm, const std::vector<int>& ranks, double timeout_s) {
            check(rank.client().create_comm(comm, ranks, seconds(timeout_s)));
          },
          py::arg("comm"), py::arg("ranks"), py::arg("timeout_s") = 60.0, Release())
      .def(
          "destroy_comm", [](Rank& rank, uint32_t comm) { check(rank.client().destroy_comm(comm)); }, py::arg("comm"),
          Release())
      .def("submit", &Rank::submit, py::kw_only(), py::arg("comm"), py::arg("kind"), py::arg("dtype"),
           py::arg("op") = 0, py::arg("count"), py::arg("root") = -1, py::arg("src") = nowhere,
           py::arg("dst") = nowhere, py::arg("shape") = std::vector<int64_t>{}, py::arg("label") = "",
           py::arg("codec") = 0, py::arg("density") = 0, py::arg("residual") = 0, py::arg("exact") = 0,
           py::arg("residual_sides") = 0, py::arg("fenced") = false, py::arg("chunk_kib") = 0,
           py::arg("generation") = 0)
      .def("transfer", &Rank::transfer, py::arg("comm"), py::arg("kind"), py::arg("dtype"), py::arg("op"),
           py::arg("root"), py::arg("count"), py::arg("src"), py::arg("src_rows"), py::arg("dst"), py::arg("dst_rows"),
           py::arg("together"), py::arg("shape"), py::arg("codec"), py::arg("density"), py::arg("timeout_s"),
           py::arg("generation") = 0, py::keep_alive<0, 1>())
      .def("enter", &Rank::enter, py::arg("timeout_s") = -1.0)
      .def("view", &Rank::view)
      .def("planned", [](Rank& rank) { return rank.client().planned(); })
      .def("done", &Rank::done, py::arg("ticket"))
      .def("wait", &Rank::wait, py::arg("ticket"), py::arg("timeout_s") = -1.0)
      .def("counters", [](Rank& rank) { return counters_dict(*rank.client().counters()); })
      .def("host_api", &Rank::host_api)
      .def("error", [](Rank& rank) { return text(rank.client().error()); })
      .def("close", [](Rank& rank) { rank.client().close(); }, Release());
}

int start_process(const std::vector<std::string>& argv, const std::map<std::string, std::string>& env,
                  const std::string& cwd, int stdout_fd, int stderr_fd, int death_signal) {
  SpawnRequest request;
  request.argv = argv;
  for (const auto& [name, value] : env) request.env.push_back(name + "=" + value);
  request.cwd = cwd;
  request.stdout_fd = stdout_fd;
  request.stderr_fd = stderr_fd;
  request.death_signal = death_signal;
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
  std::vector<py::buffer_info> held;
  std::vector<const void*> sources;
  const auto hold = [&held, bytes](const py::buffer& buffer, bool writable) {
    held.push_back(buffer.request(writable));
    if (static_cast<size_t>(held.back().size * held.back().itemsize) < bytes)
      throw py::value_error("a buffer is too small");
    return held.back().ptr;
  };
  for (const py::buffer& input : inputs) sources.push_back(hold(input, false));
  if (sources.empty()) throw py::value_error("at least one input is needed");
  void* target = hold(output, true);
  py::gil_scoped_release release;
  reduce(type, static_cast<ReduceOp>(op), sources.data(), static_cast<int>(sources.size()), &target, 1, count, scale,
         false);
}

void bind_functions(py::module_* module) {
  module->def("spawn", &start_process, py::arg("argv"), py::arg("env"), py::arg("cwd"), py::arg("stdout_fd"),
              py::arg("stderr_fd"), py::arg("death_signal") = 9);
  module->def("reduce", &reduce_buffers, py::arg("dtype"), py::arg("op"), py::arg("inputs"), py::arg("output"),
              py::arg("count"), py::arg("scale") = 1);
  module->def(
      "crc32c",
      [](const py::buffer& data, uint32_t seed) {
        const py::buffer_info info = data.request();
        return crc32c(info.ptr, static_cast<size_t>(info.size * info.itemsize), seed);
      },
      py::arg("data"), py::arg("seed") = 0);
  module->def(
      "hmac_sha256",
      [](const py::bytes& key, const py::bytes& data) {
        const std::string k = key, d = data;
        const Digest digest = hmac_sha256(k.data(), k.size(), d.data(), d.size());
        return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
      },
      py::arg("key"), py::arg("data"));
}

void bind_names(py::module_* module) {
  py::dict kinds, dtypes, ops;
  for (int kind = 0; kind < kKinds; ++kind) kinds[kind_name(static_cast<Kind>(kind))] = kind;
  for (int dtype = 0; dtype < kDTypes; ++dtype) dtypes[dtype_name(static_cast<DType>(dtype))] = dtype;
  for (uint8_t op = 0; op <= 10; ++op) {
    if (op_known(op)) ops[op_name(static_cast<ReduceOp>(op))] = op;
  }
  module->attr("VERSION") = kCoreVersion;
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
    }
  });
  bagua::bind_names(&module);
  bagua::bind_engine(&module);
  bagua::bind_segment(&module);
  bagua::bind_rank(&module);
  bagua::bind_functions(&module);
  bagua::bind_codec(&module);
  bagua::bind_low_rank(&module);
}
