// Binds the engine to Python, for the node daemon; typed by ../../core.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/python_errors.h"
#include "engine/job/engine.h"

namespace py = pybind11;

namespace bagua {
namespace {

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
                                    bool measure_ring, const std::string& encryption, Members members, bool elastic,
                                    bool newcomers, int memory, int64_t rank_uid) {
  EngineOptions options;
  options.credentials.job_id = std::move(job_id);
  Membership membership{generation, host_index, std::move(hosts), std::move(members).value_or(std::vector<int>()),
                        newcomers};
  options.data_socket = std::move(data_socket);
  options.tokens = tokens_of(tokens);
  options.elastic = elastic;
  options.memory = memory;
  options.rank_uid = rank_uid;
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
  py::gil_scoped_release release;
  check(engine->regroup(std::move(next), shown));
}

void plan(Engine* engine, uint64_t generation, int host_index, std::vector<std::vector<int>> hosts, Members members,
          std::vector<std::string> peers, bool hold) {
  Plan next;
  next.here = host_index >= 0;
  next.hold = hold;
  next.next = {generation, host_index, std::move(hosts), std::move(members).value_or(std::vector<int>())};
  next.peers = std::move(peers);
  py::gil_scoped_release release;
  check(engine->plan(std::move(next)));
}

void open_lobby(Engine* engine, const std::vector<int>& members, const std::map<int, py::bytes>& tokens) {
  const Tokens shown = tokens_of(tokens);
  py::gil_scoped_release release;
  check(engine->open_lobby(members, shown));
}

py::list take_events(Engine* engine) {
  py::list events;
  for (const Event& event : engine->events()) {
    py::dict entry;
    entry["kind"] = event.kind;
    entry["rank"] = event.rank;
    const bool suspended = std::string(event.kind) == "suspended";
    if (event.host >= 0 || suspended) entry["host"] = event.host;
    if (suspended) entry["accused"] = event.accused;
    if (event.generation > 0) {
      entry["generation"] = event.generation;
      entry["passes"] = event.passes;
    }
    entry["text"] = text(event.text);
    events.append(entry);
  }
  return events;
}

py::tuple stop_trace(Engine* engine) {
  const auto [spans, dropped] = engine->stop_trace();
  py::list list;
  for (const TraceSpan& span : spans) {
    list.append(py::make_tuple(span.phase, text(span.name), span.comm, span.sequence, span.begin_ns, span.end_ns,
                               span.peer, span.bytes));
  }
  return py::make_tuple(list, dropped);
}

}  // namespace

void bind_engine(py::module_* module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Engine>(*module, "Engine")
      .def(py::init(&make_engine), py::kw_only(), py::arg("job_id"), py::arg("generation"), py::arg("host_index"),
           py::arg("hosts"), py::arg("data_socket"), py::arg("tokens"), py::arg("job_key"), py::arg("listen"),
           py::arg("streams") = 4, py::arg("chunk_bytes") = 524288, py::arg("threads") = 0,
           py::arg("connect_timeout_s") = 30.0, py::arg("memory_limit") = 0, py::arg("peer_timeout_s") = 30.0,
           py::arg("measure_ring") = true, py::arg("encryption") = "beyond loopback", py::arg("members") = Members(),
           py::arg("elastic") = false, py::arg("newcomers") = false, py::arg("memory") = -1, py::arg("rank_uid") = -1)
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
      .def("withdraw", &Engine::withdraw, py::arg("reason"), Release())
      .def("stats", [](Engine& engine) { return counters_dict(engine.counters()); })
      .def(
          "start_trace", [](Engine& engine, uint64_t request, size_t most) { engine.start_trace(request, most); },
          py::kw_only(), py::arg("request"), py::arg("most"))
      .def("stop_trace", &stop_trace)
      .def("set_fence", &Engine::set_fence, py::arg("at_ns"))
      .def("close", &Engine::close, Release());
}

}  // namespace bagua
