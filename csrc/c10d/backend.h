// A backend of torch.distributed over the node daemon, for one group.
//
// backend.cpp: the group, and how operations begin; collectives.cpp and point_to_point.cpp: the operations; sparse.cpp:
// all-reduce of sparse tensors.
//
// Errors of arguments are ValueErrors on the rank that passed them. Those of the job (a lost rank, calls that differ, a
// timeout) are DistBackendErrors, with the core's words.
//
// Thread safety: any thread, as with other backends; all ranks must call collectives in the same order.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "base/mutex.h"
#include "c10d/direct.h"
#include "c10d/elements.h"
#include "c10d/host.h"
#include "c10d/work.h"

namespace bagua::dist {

using Tensors = std::vector<at::Tensor>;
using TorchWork = c10::intrusive_ptr<::c10d::Work>;
using Milliseconds = std::chrono::milliseconds;

// This process in a group. The ranks of the communicator are in the order of the group's.
struct Seat {
  int rank = 0, size = 1;
  uint32_t comm = 0;
  uint64_t generation = 0;
  std::shared_ptr<void> keeper;     // of the communicator
  std::function<void()> shut_down;  // called once, when the group is destroyed by name
  std::vector<pid_t> processes;     // of the members, if they may read each other's memory; else empty
};

class BaguaBackend : public ::c10d::Backend {
 public:
  BaguaBackend(std::shared_ptr<Host> host, Seat seat, Milliseconds timeout);
  ~BaguaBackend() override { reap(); }

  const std::string getBackendName() const override { return "bagua"; }
  // New in later versions of torch.
  virtual bool supportsCoalescing() const { return true; }
  virtual void setTimeout(Milliseconds timeout) { timeout_ms_.store(timeout.count()); }
  virtual bool supportsTensorAlloc(c10::DeviceIndex device) { return device < 0; }
  // In memory that the daemon sees: operations on it copy nothing.
  virtual at::Tensor allocateTensor(long size, at::TensorOptions options);
  // How often it was called, of any group.
  static uint64_t allocations();
  virtual void abort() { end_all("aborted"); }
  virtual void shutdown();
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  void startCoalescing() override;
  TorchWork endCoalescing() override;

  TorchWork broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  TorchWork allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  TorchWork allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) override;
  TorchWork reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override;
  TorchWork allgather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  TorchWork _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) override;
  TorchWork allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                const ::c10d::AllgatherOptions& opts) override;
  TorchWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const ::c10d::AllgatherOptions& opts) override;
  TorchWork gather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) override;
  TorchWork scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ::c10d::ScatterOptions& opts) override;
  TorchWork reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                           const ::c10d::ReduceScatterOptions& opts) override;
  TorchWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const ::c10d::ReduceScatterOptions& opts) override;
  TorchWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const ::c10d::ReduceScatterOptions& opts) override;
  TorchWork barrier(const ::c10d::BarrierOptions& opts) override;

  TorchWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) override;
  TorchWork alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) override;
  TorchWork send(Tensors& tensors, int dst, int tag) override;
  TorchWork recv(Tensors& tensors, int src, int tag) override;
  TorchWork recvAnysource(Tensors& tensors, int tag) override;

 private:
  // An operation that is being put together.
  struct Call {
    ::c10d::OpType type;
    const char* title;
    std::optional<Tensors> inputs;  // for the profiler
    Milliseconds timeout;
    bool asynchronous = true;
    Plan plan;
    bool on_device = false;  // some tensor is not in this host's memory
  };

  TransferRequest request(Kind kind, const Element& element, const at::Tensor& shape, uint64_t count) const;
  TransferRequest request(Kind kind, const at::Tensor& moved) const {
    return request(kind, element_of(moved.scalar_type()), moved, static_cast<uint64_t>(moved.numel()));
  }
  // Checks a tensor, and gives the one to read, or to write, in this host's memory, contiguous. What was written
  // elsewhere is copied at the end.
  at::Tensor on_host(Call* call, const at::Tensor& tensor, bool read, bool written) const;
  at::Tensor given(Call* call, const at::Tensor& tensor) const { return on_host(call, tensor, true, false); }
  at::Tensor taken(Call* call, const at::Tensor& tensor) const { return on_host(call, tensor, false, true); }
  // One tensor for `list`, in which its elements follow each other: the memory of the list itself if it lies so.
  at::Tensor list_of(Call* call, const Tensors& list, const at::Tensor& like, bool written) const;

  // Whether blocks of so many bytes are read from where they lie. The same on all ranks.
  bool direct(size_t bytes) const { return !seat_.processes.empty() && seat_.size > 1 && bytes >= kLeastDirect; }
  // `move`, and the two operations around it. `what` says what is called, and where this rank's source is.
  void add_direct(Call* call, const TransferRequest& what, std::function<void(const Peers&)> move) const;
  // Waits for the ranks. The work that is returned is over when all have the result.
  TorchWork allreduce_of_sparse(const at::Tensor& tensor, const ::c10d::AllreduceOptions& opts);
  at::Tensor gathered(const char* title, const at::Tensor& own, Milliseconds timeout);

  void add_allreduce(Call* call, const at::Tensor& tensor, const ::c10d::ReduceOp& op) const;
  void add_allgather(Call* call, const at::Tensor& output, const at::Tensor& input) const;
  // Of contiguous tensors of this host's memory.
  void add_allgather_of(Call* call, const at::Tensor& to, const at::Tensor& from) const;
  void add_reduce_scatter_of(Call* call, const at::Tensor& to, const at::Tensor& from, int64_t count,
                             const ::c10d::ReduceOp& op) const;
  void add_reduce_scatter(Call* call, const at::Tensor& output, const at::Tensor& input,
                          const ::c10d::ReduceOp& op) const;
  // Block `peer` of an all-to-all.
  void add_block(Call* call, Kind kind, const at::Tensor& flat, int64_t begin, int64_t length, int peer,
                 uint32_t tag) const;
  TorchWork point_to_point(Call call, Kind kind, const at::Tensor& tensor, int peer, int tag);

  TorchWork begin(Call call);        // a collective
  TorchWork begin_apart(Call call);  // one that waits for no other
  TorchWork begin_in(const std::shared_ptr<Queue>& queue, Call call, uint64_t sequence);
  void reap();
  void end_all(const std::string& what);  // that is not over; `what` became of the group

  const std::shared_ptr<Host> host_;
  const Seat seat_;
  const std::shared_ptr<Queue> collectives_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<uint32_t> exchanges_{0};  // all-to-all operations so far

  Mutex mutex_;  // guards the rest
  std::deque<WorkPtr> apart_;
  std::vector<TorchWork> coalesced_;
  bool coalescing_ = false, closed_ = false;
};

}  // namespace bagua::dist
