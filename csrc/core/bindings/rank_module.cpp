// Binds a rank's side of the channel to Python; typed by ../../core.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/python_errors.h"
#include "channel/client.h"
#include "channel/host_api.h"
#include "channel/layout.h"
#include "channel/transfer.h"

namespace py = pybind11;

namespace bagua {
namespace {

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
  return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

// Runs `wait`, which returns a Status, without the interpreter lock; false: its time has passed.
template <class Wait>
bool waited(const Wait& wait) {
  Status status;
  {
    py::gil_scoped_release release;
    status = wait();
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();  // KeyboardInterrupt, or what a handler raised
  if (status.code() == Code::kTimeout) return false;
  check(status);
  return true;
}

// A small all-reduce behind all that a step of an elastic job communicates: see torch_api's comm/commit/flags.py.
// `values` lie where the operation reads and writes. `ticket`: 0 unless it is under way.
struct Flags {
  Descriptor descriptor;
  int32_t* values;
  int32_t given = 0;
  uint64_t ticket = 0;
};
using Told = std::tuple<int32_t, int32_t, int32_t>;

TransferRequest call(uint8_t kind, uint8_t dtype, uint8_t op, int root, uint64_t src_rows, uint64_t dst_rows,
                     bool together, uint8_t codec, uint16_t density) {
  if (dtype >= kDTypes) throw py::value_error("unknown dtype");
  TransferRequest made;
  made.descriptor.kind = kind;
  made.descriptor.dtype = dtype;
  made.descriptor.op = op;
  made.descriptor.root = root;
  made.descriptor.codec = codec;
  made.descriptor.density = density;
  made.src_rows = src_rows;
  made.dst_rows = dst_rows;
  made.together = together;
  return made;
}

// A transfer that takes long.
struct PendingTransfer {
  std::unique_ptr<Transfer> transfer;
  ~PendingTransfer() {
    py::gil_scoped_release release;
    transfer.reset();  // may talk to the daemon
  }

  bool run(double timeout_s) {
    return waited([&] { return transfer->run(deadline_after(timeout_s), &signalled); });
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

  Segment alloc(uint64_t bytes, bool for_peers) {
    ChannelClient::Allocation allocation;
    py::gil_scoped_release release;
    check(client_->alloc(bytes, &allocation, for_peers));
    return {allocation.id, std::move(allocation.memory)};
  }

  Segment borrow(uint32_t owner, uint64_t id) {
    ChannelClient::Allocation allocation;
    py::gil_scoped_release release;
    check(client_->borrow(owner, id, &allocation));
    return {allocation.id, std::move(allocation.memory)};
  }

  Descriptor describe(uint32_t comm, int kind, int dtype, int op, uint64_t count, int root,
                      const std::tuple<uint32_t, uint64_t>& src, const std::tuple<uint32_t, uint64_t>& dst,
                      const std::vector<int64_t>& shape, const std::string& label, int codec, int64_t density,
                      uint32_t residual, uint32_t exact, int residual_sides, bool fenced, uint16_t chunk_kib) const {
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
    return descriptor;
  }

  uint64_t submit(uint32_t comm, int kind, int dtype, int op, uint64_t count, int root,
                  const std::tuple<uint32_t, uint64_t>& src, const std::tuple<uint32_t, uint64_t>& dst,
                  const std::vector<int64_t>& shape, const std::string& label, int codec, int64_t density,
                  uint32_t residual, uint32_t exact, int residual_sides, bool fenced, uint16_t chunk_kib,
                  uint64_t generation, Flags* behind, bool defer) {
    const Descriptor descriptor = describe(comm, kind, dtype, op, count, root, src, dst, shape, label, codec, density,
                                           residual, exact, residual_sides, fenced, chunk_kib);
    uint64_t tickets[2] = {0, 0};
    ChannelClient::Submission how;
    how.generation = generation;
    if (defer) how.defer = ChannelClient::Submission::Defer::kIfPossible;
    if (behind == nullptr) {
      check(client_->submit({&descriptor}, tickets, how));
    } else {
      fill(behind);
      check(client_->submit({&descriptor, &behind->descriptor}, tickets, how));
      behind->ticket = tickets[1];
    }
    return tickets[0];
  }

  // `values`: address of three int32, at `place`.
  Flags flags(uint32_t comm, uintptr_t values, const std::tuple<uint32_t, uint64_t>& place) const {
    const int kind = static_cast<int>(Kind::kAllReduce), dtype = static_cast<int>(DType::kI32);
    const int op = static_cast<int>(ReduceOp::kMax);
    return {describe(comm, kind, dtype, op, 3, -1, place, place, {}, "flags", 0, 0, 0, 0, 0, true, 0),
            reinterpret_cast<int32_t*>(values)};
  }

  void send_flags(Flags* flags, uint64_t generation) {
    ChannelClient::Submission how;
    how.generation = generation;
    how.defer = ChannelClient::Submission::Defer::kBehind;
    fill(flags);
    check(client_->submit(flags->descriptor, &flags->ticket, how));
  }

  void fill(Flags* flags) const {
    flags->values[0] = flags->given;
    flags->values[1] = -flags->given;
    flags->values[2] = static_cast<int32_t>(client_->planned());
  }

  // One operation on tensors at any address; nullptr: it is over.
  std::unique_ptr<PendingTransfer> transfer(TransferRequest request, uint32_t comm, uint64_t count, uintptr_t src,
                                            uintptr_t dst, const std::vector<int64_t>& shape, double timeout_s,
                                            uint64_t generation) {
    request.descriptor.comm = comm;
    request.descriptor.count = count;
    if (shape.size() <= kMaxDims) {
      request.descriptor.ndim = static_cast<uint8_t>(shape.size());
      std::copy(shape.begin(), shape.end(), request.descriptor.dims);
    }
    request.src = reinterpret_cast<const char*>(src);
    request.dst = reinterpret_cast<char*>(dst);
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
    const auto wait = [&] { return client_->wait(ticket, deadline_after(timeout_s), &signalled, &times); };
    if (!waited(wait)) return std::nullopt;
    return std::make_tuple(times.submitted_ns, times.started_ns, times.done_ns);
  }

  using AllTimes = std::vector<std::tuple<int64_t, int64_t, int64_t>>;
  std::optional<std::pair<AllTimes, Told>> wait_all(std::vector<uint64_t> tickets, Flags* behind, double timeout_s) {
    const size_t operations = tickets.size();
    if (behind != nullptr) tickets.push_back(behind->ticket);
    std::vector<ChannelClient::Times> times;
    const auto wait = [&] { return client_->wait_all(tickets, deadline_after(timeout_s), &signalled, &times); };
    if (!waited(wait)) return std::nullopt;
    std::pair<AllTimes, Told> found;
    if (times.size() < tickets.size()) return found;
    for (size_t i = 0; i < operations; ++i) {
      found.first.emplace_back(times[i].submitted_ns, times[i].started_ns, times[i].done_ns);
    }
    if (behind != nullptr) {
      behind->ticket = 0;
      found.second = {behind->values[0], behind->values[1], behind->values[2]};
    }
    return found;
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
    const auto wait = [&] { return client_->enter(deadline_after(timeout_s), &signalled); };
    return waited(wait) ? std::optional(view()) : std::nullopt;
  }

  ChannelClient& client() { return *client_; }
  // For the GPU leg, which keeps this object alive.
  py::capsule host_api() { return py::capsule(&host_api_, kHostApiCapsule); }

 private:
  std::unique_ptr<ChannelClient> client_;
  HostApi host_api_{};
  std::unique_ptr<StagePool> stages_;
};

}  // namespace

void bind_rank(py::module_* module) {
  bind_segment(module);
  using Release = py::call_guard<py::gil_scoped_release>;
  const std::tuple<uint32_t, uint64_t> nowhere{0, 0};
  py::class_<TransferRequest>(*module, "Call")
      .def(py::init(&call), py::kw_only(), py::arg("kind"), py::arg("dtype"), py::arg("op") = 0, py::arg("root") = -1,
           py::arg("src_rows") = 1, py::arg("dst_rows") = 1, py::arg("together") = false, py::arg("codec") = 0,
           py::arg("density") = 0);
  py::class_<PendingTransfer>(*module, "PendingTransfer").def("wait", &PendingTransfer::run, py::arg("timeout_s"));
  py::class_<Flags>(*module, "Flags").def_readwrite("given", &Flags::given).def_readwrite("ticket", &Flags::ticket);
  py::class_<Rank>(*module, "Rank")
      .def(py::init([](const std::string& data_socket, const py::bytes& token, int rank, double timeout_s) {
             return std::make_unique<Rank>(data_socket, token, rank, timeout_s);
           }),
           py::kw_only(), py::arg("data_socket"), py::arg("token"), py::arg("rank"), py::arg("timeout_s") = 30.0)
      .def(
          "require", [](Rank& rank, uint64_t nbytes) { check(rank.client().require(nbytes)); }, py::arg("nbytes"),
          Release())
      .def("alloc", &Rank::alloc, py::arg("nbytes"), py::arg("for_peers") = false)
      .def("borrow", &Rank::borrow, py::arg("owner"), py::arg("segment_id"))
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
           py::arg("generation") = 0, py::arg("behind") = py::none(), py::arg("defer") = false)
      .def("flags", &Rank::flags, py::arg("comm"), py::arg("values"), py::arg("place"))
      .def("send_flags", &Rank::send_flags, py::arg("flags"), py::arg("generation") = 0)
      // No names of arguments: matching them takes as long as a small operation.
      .def("transfer", &Rank::transfer, py::keep_alive<0, 1>())
      .def("enter", &Rank::enter, py::arg("timeout_s") = -1.0)
      .def("view", &Rank::view)
      .def("planned", [](Rank& rank) { return rank.client().planned(); })
      .def("trace", [](Rank& rank) { return rank.client().trace(); })
      .def("done", &Rank::done, py::arg("ticket"))
      .def(
          "abandon", [](Rank& rank, uint64_t ticket) { rank.client().abandon(ticket); }, py::arg("ticket"))
      .def("wait", &Rank::wait, py::arg("ticket"), py::arg("timeout_s") = -1.0)
      .def("wait_all", &Rank::wait_all, py::arg("tickets"), py::arg("behind") = py::none(), py::arg("timeout_s") = -1.0)
      .def("counters", [](Rank& rank) { return counters_dict(*rank.client().counters()); })
      .def("host_api", &Rank::host_api)
      .def("error", [](Rank& rank) { return text(rank.client().error()); })
      .def(
          "note_passes", [](Rank& rank, uint64_t passes) { rank.client().note_passes(passes); }, py::arg("passes"))
      .def(
          "fail", [](Rank& rank, const std::string& text, bool lost) { rank.client().fail(text, lost); },
          py::arg("text"), py::arg("lost") = false, Release())
      .def(
          "close", [](Rank& rank, const std::string& words) { rank.client().close(words); }, py::arg("words") = "",
          Release());
}

}  // namespace bagua
