// Collective operations. Each checks its tensors, and says in which memory of this host the core works.
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "c10d/backend.h"

namespace bagua::dist {

namespace {

using ::c10d::OpType;

// Whether the caller goes on before the operation is done. Versions of torch before 2.8 do not say.
template <class Options>
auto asynchronous(const Options& options, int) -> decltype(options.asyncOp) {
  return options.asyncOp;
}
template <class Options>
bool asynchronous(const Options&, long) {
  return true;
}

char* data(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.data_ptr());
}

const at::Tensor& only(const char* title, const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, title, ": ", tensors.size(), " tensors were passed; it takes one. [BG410]");
  return tensors.front();
}

int checked_root(const char* title, int64_t root, int size) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, title, ": root ", root, " must be 0 to ", size - 1, ". [BG404]");
  return static_cast<int>(root);
}

// Of what `add_direct` tells: "8 x float32", of a reduction "8 x float32, SUM". Any number, should ranks call other
// operations meanwhile.
std::string words_of(int64_t told) {
  std::string words = std::to_string(told >> 16) + " x " + dtype_name(static_cast<DType>(told >> 8 & 0xf));
  if (static_cast<Kind>(told >> 12 & 0xf) == Kind::kReduceScatter)
    words += std::string(", ") + op_name(static_cast<ReduceOp>(told & 0xff));
  return words;
}

void check_equally_many(const char* title, const Tensors& outputs, const Tensors& inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size() && !inputs.empty(), title, ": ", outputs.size(), " outputs and ",
                    inputs.size(), " inputs were passed; there must be equally many. [BG402]");
}

}  // namespace

void BaguaBackend::add_allreduce(Call* call, const at::Tensor& tensor, const ::c10d::ReduceOp& op) const {
  const at::Tensor used = on_host(call, tensor, true, true);
  const Reduction reduction = reduction_of(tensor.scalar_type(), op, call->title);
  TransferRequest made = request(Kind::kAllReduce, reduction.element, tensor, static_cast<uint64_t>(tensor.numel()));
  made.descriptor.op = static_cast<uint8_t>(reduction.op);
  made.src = made.dst = data(used);
  made.together = true;
  call->plan.requests.push_back(made);
  call->plan.outputs.push_back(tensor);
}

TorchWork BaguaBackend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  Call call{OpType::ALLREDUCE, "bagua:all_reduce", tensors, opts.timeout, asynchronous(opts, 0), {}};
  const at::Tensor& tensor = only(call.title, tensors);
  if (tensor.defined() && tensor.layout() != at::kStrided) return allreduce_of_sparse(tensor, opts);
  add_allreduce(&call, tensor, opts.reduceOp);
  return begin(std::move(call));
}

TorchWork BaguaBackend::allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) {
  Call call{OpType::ALLREDUCE_COALESCED, "bagua:all_reduce", tensors, opts.timeout, asynchronous(opts, 0), {}};
  TORCH_CHECK_VALUE(!tensors.empty(), call.title, ": no tensors were passed. [BG410]");
  for (const at::Tensor& tensor : tensors) {
    check_alike(call.title, tensors.front(), tensor);
    add_allreduce(&call, tensor, opts.reduceOp);
  }
  return begin(std::move(call));
}

TorchWork BaguaBackend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) {
  Call call{OpType::BROADCAST, "bagua:broadcast", tensors, opts.timeout, asynchronous(opts, 0), {}};
  const at::Tensor& tensor = only(call.title, tensors);
  const int root = checked_root(call.title, opts.rootRank, seat_.size);
  const bool gives = root == seat_.rank;
  const at::Tensor used = on_host(&call, tensor, gives, !gives);
  TransferRequest made = request(Kind::kBroadcast, tensor);
  made.descriptor.root = root;
  if (gives) {
    made.src = data(used);
  } else {
    made.dst = data(used);
  }
  made.together = gives;
  call.plan.requests.push_back(made);
  call.plan.outputs.push_back(tensor);
  return begin(std::move(call));
}

TorchWork BaguaBackend::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  Call call{OpType::REDUCE, "bagua:reduce", tensors, opts.timeout, asynchronous(opts, 0), {}};
  const at::Tensor& tensor = only(call.title, tensors);
  const int root = checked_root(call.title, opts.rootRank, seat_.size);
  const bool takes = root == seat_.rank;
  const at::Tensor used = on_host(&call, tensor, true, takes);
  const Reduction reduction = reduction_of(tensor.scalar_type(), opts.reduceOp, call.title);
  TransferRequest made = request(Kind::kReduce, reduction.element, tensor, static_cast<uint64_t>(tensor.numel()));
  made.descriptor.op = static_cast<uint8_t>(reduction.op);
  made.descriptor.root = root;
  made.src = data(used);
  if (takes) made.dst = data(used);
  made.together = takes;
  call.plan.requests.push_back(made);
  call.plan.outputs.push_back(tensor);
  return begin(std::move(call));
}

void BaguaBackend::add_direct(Call* call, const TransferRequest& what, std::function<void(const Peers&)> move) const {
  // Places, then what is called: ranks add up vectors of which each has filled its own elements alone.
  const size_t ranks = static_cast<size_t>(seat_.size), own = static_cast<size_t>(seat_.rank);
  const at::Tensor told = at::zeros({2 * seat_.size}, at::kLong), end = at::zeros({1}, at::kLong);
  int64_t* const values = told.data_ptr<int64_t>();
  const Descriptor& d = what.descriptor;
  values[own] = static_cast<int64_t>(reinterpret_cast<uintptr_t>(what.src));
  values[ranks + own] = static_cast<int64_t>(d.count << 16 | uint64_t{d.kind} << 12 | uint64_t{d.dtype} << 8 | d.op);
  for (const at::Tensor& tensor : {told, end}) {
    TransferRequest made = request(Kind::kAllReduce, {DType::kI64, 1}, {}, static_cast<uint64_t>(tensor.numel()));
    made.src = made.dst = data(tensor);
    made.together = true;
    call->plan.requests.push_back(made);
    call->plan.held.push_back(tensor);
  }
  const auto between = [title = call->title, told, ranks, processes = seat_.processes, own = seat_.rank,
                        move = std::move(move)] {
    const int64_t* const found = told.data_ptr<int64_t>();
    const int64_t* const said = found + ranks;
    for (size_t rank = 0; rank < ranks; ++rank) {
      TORCH_CHECK_WITH(DistBackendError, said[rank] == said[own], title, ": ranks 0 to ", ranks - 1,
                       " of the group passed different sizes, dtypes or reductions: here ", words_of(said[own]),
                       ", on rank ", rank, " ", words_of(said[rank]), ". All ranks must pass the same. [BG501]");
    }
    move({processes, own, std::vector<uint64_t>(found, found + ranks)});
  };
  call->plan.afters.resize(call->plan.requests.size());
  call->plan.afters[call->plan.requests.size() - 2] = between;
}

void BaguaBackend::add_allgather_of(Call* call, const at::Tensor& to, const at::Tensor& from) const {
  TransferRequest made = request(Kind::kAllGather, from);
  made.src = data(from);
  made.dst = data(to);
  made.dst_rows = static_cast<uint64_t>(seat_.size);
  if (!direct(from.nbytes())) return call->plan.requests.push_back(made);
  add_direct(call, made, [src = made.src, dst = made.dst, bytes = from.nbytes()](const Peers& peers) {
    gather_directly(peers, src, dst, bytes);
  });
}

void BaguaBackend::add_reduce_scatter_of(Call* call, const at::Tensor& to, const at::Tensor& from, int64_t count,
                                         const ::c10d::ReduceOp& op) const {
  const Reduction reduction = reduction_of(from.scalar_type(), op, call->title);
  TransferRequest made = request(Kind::kReduceScatter, reduction.element, to, static_cast<uint64_t>(count));
  made.descriptor.op = static_cast<uint8_t>(reduction.op);
  made.src = data(from);
  made.dst = data(to);
  made.src_rows = static_cast<uint64_t>(seat_.size);
  if (!direct(to.nbytes())) return call->plan.requests.push_back(made);
  const auto move = [host = host_, reduction, src = made.src, dst = made.dst, elements = made.descriptor.count](
                        const Peers& peers) { reduce_directly(peers, *host, reduction, src, dst, elements); };
  add_direct(call, made, move);
}

void BaguaBackend::add_allgather(Call* call, const at::Tensor& output, const at::Tensor& input) const {
  check_alike(call->title, output, input);
  TORCH_CHECK_VALUE(output.numel() == input.numel() * seat_.size, call->title, ": the output has ", output.numel(),
                    " elements; it must have ", seat_.size, " times the ", input.numel(), " of the input. [BG402]");
  const at::Tensor from = given(call, input), to = taken(call, output);
  add_allgather_of(call, to, from);
  call->plan.outputs.push_back(output);
}

TorchWork BaguaBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) {
  Call call{OpType::_ALLGATHER_BASE, "bagua:_all_gather_base", Tensors{input}, opts.timeout, asynchronous(opts, 0), {}};
  add_allgather(&call, output, input);
  return begin(std::move(call));
}

TorchWork BaguaBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const ::c10d::AllgatherOptions& opts) {
  Call call{
      OpType::COALESCED, "bagua:all_gather_into_tensor_coalesced", inputs, opts.timeout, asynchronous(opts, 0), {}};
  check_equally_many(call.title, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) add_allgather(&call, outputs[i], inputs[i]);
  return begin(std::move(call));
}

TorchWork BaguaBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const ::c10d::AllgatherOptions& opts) {
  Call call{OpType::ALLGATHER, "bagua:all_gather", inputs, opts.timeout, asynchronous(opts, 0), {}};
  const at::Tensor& input = only(call.title, inputs);
  TORCH_CHECK_VALUE(outputs.size() == 1, call.title, ": ", outputs.size(), " lists were passed; it takes one. [BG410]");
  const at::Tensor from = given(&call, input), to = list_of(&call, outputs.front(), input, true);
  add_allgather_of(&call, to, from);
  call.plan.outputs = outputs.front();
  return begin(std::move(call));
}

TorchWork BaguaBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                            const ::c10d::AllgatherOptions& opts) {
  Call call{OpType::ALLGATHER_COALESCED, "bagua:all_gather_coalesced", inputs, opts.timeout, asynchronous(opts, 0), {}};
  TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == seat_.size, call.title, ": ", outputs.size(),
                    " lists were passed; there must be one for each of the ", seat_.size, " ranks. [BG402]");
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors list;
    for (const Tensors& of_rank : outputs) {
      check_equally_many(call.title, of_rank, inputs);
      list.push_back(of_rank[i]);
    }
    const at::Tensor from = given(&call, inputs[i]), to = list_of(&call, list, inputs[i], true);
    add_allgather_of(&call, to, from);
    call.plan.outputs.insert(call.plan.outputs.end(), list.begin(), list.end());
  }
  return begin(std::move(call));
}

TorchWork BaguaBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) {
  Call call{OpType::GATHER, "bagua:gather", inputs, opts.timeout, asynchronous(opts, 0), {}};
  const at::Tensor& input = only(call.title, inputs);
  const int root = checked_root(call.title, opts.rootRank, seat_.size);
  const bool takes = root == seat_.rank;
  TORCH_CHECK_VALUE(outputs.size() == (takes ? 1 : 0), call.title,
                    ": a list of outputs must be passed on the destination, and there alone. [BG402]");
  const at::Tensor from = given(&call, input);
  TransferRequest made = request(Kind::kGather, input);
  made.descriptor.root = root;
  made.src = data(from);
  made.dst_rows = static_cast<uint64_t>(seat_.size);
  if (takes) {
    made.dst = data(list_of(&call, outputs.front(), input, true));
    call.plan.outputs = outputs.front();
  }
  call.plan.requests.push_back(made);
  return begin(std::move(call));
}

TorchWork BaguaBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ::c10d::ScatterOptions& opts) {
  Call call{OpType::SCATTER, "bagua:scatter", std::nullopt, opts.timeout, asynchronous(opts, 0), {}};
  const at::Tensor& output = only(call.title, outputs);
  const int root = checked_root(call.title, opts.rootRank, seat_.size);
  const bool gives = root == seat_.rank;
  TORCH_CHECK_VALUE(inputs.size() == (gives ? 1 : 0), call.title,
                    ": a list of inputs must be passed on the source, and there alone. [BG402]");
  if (gives) call.inputs = inputs.front();
  const at::Tensor to = taken(&call, output);
  TransferRequest made = request(Kind::kScatter, output);
  made.descriptor.root = root;
  made.dst = data(to);
  made.src_rows = static_cast<uint64_t>(seat_.size);
  if (gives) made.src = data(list_of(&call, inputs.front(), output, false));
  call.plan.requests.push_back(made);
  call.plan.outputs.push_back(output);
  return begin(std::move(call));
}

void BaguaBackend::add_reduce_scatter(Call* call, const at::Tensor& output, const at::Tensor& input,
                                      const ::c10d::ReduceOp& op) const {
  check_alike(call->title, output, input);
  TORCH_CHECK_VALUE(input.numel() == output.numel() * seat_.size, call->title, ": the input has ", input.numel(),
                    " elements; it must have ", seat_.size, " times the ", output.numel(), " of the output. [BG402]");
  const at::Tensor from = given(call, input), to = taken(call, output);
  add_reduce_scatter_of(call, to, from, output.numel(), op);
  call->plan.outputs.push_back(output);
}

TorchWork BaguaBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                             const ::c10d::ReduceScatterOptions& opts) {
  Call call{OpType::_REDUCE_SCATTER_BASE,
            "bagua:_reduce_scatter_base",
            Tensors{input},
            opts.timeout,
            asynchronous(opts, 0),
            {}};
  add_reduce_scatter(&call, output, input, opts.reduceOp);
  return begin(std::move(call));
}

TorchWork BaguaBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const ::c10d::ReduceScatterOptions& opts) {
  Call call{
      OpType::COALESCED, "bagua:reduce_scatter_tensor_coalesced", inputs, opts.timeout, asynchronous(opts, 0), {}};
  check_equally_many(call.title, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) add_reduce_scatter(&call, outputs[i], inputs[i], opts.reduceOp);
  return begin(std::move(call));
}

TorchWork BaguaBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                       const ::c10d::ReduceScatterOptions& opts) {
  Call call{OpType::REDUCE_SCATTER, "bagua:reduce_scatter", std::nullopt, opts.timeout, asynchronous(opts, 0), {}};
  const at::Tensor& output = only(call.title, outputs);
  TORCH_CHECK_VALUE(inputs.size() == 1, call.title, ": ", inputs.size(), " lists were passed; it takes one. [BG410]");
  call.inputs = inputs.front();
  const at::Tensor from = list_of(&call, inputs.front(), output, false), to = taken(&call, output);
  add_reduce_scatter_of(&call, to, from, output.numel(), opts.reduceOp);
  call.plan.outputs.push_back(output);
  return begin(std::move(call));
}

TorchWork BaguaBackend::barrier(const ::c10d::BarrierOptions& opts) {
  Call call{OpType::BARRIER, "bagua:barrier", std::nullopt, opts.timeout, asynchronous(opts, 0), {}};
  call.plan.requests.push_back(request(Kind::kBarrier, {DType::kU8, 1}, {}, 0));
  return begin(std::move(call));
}

}  // namespace bagua::dist
