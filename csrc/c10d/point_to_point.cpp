// Sends and receives, and all-to-all, which consists of them: blocks may differ in size, and ranks know only their own.
#include <c10/util/Exception.h>

#include <numeric>

#include "c10d/backend.h"

namespace bagua::dist {

namespace {

using ::c10d::OpType;

constexpr uint32_t kExchangeTag = uint32_t{1} << 31;  // tags of programs are below

// Where the blocks of all ranks begin in a tensor whose first dimension is split, in elements, and its end.
std::vector<int64_t> begins(const char* title, const char* side, const at::Tensor& tensor,
                            const std::vector<int64_t>& splits, int size) {
  const int64_t length = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<int64_t> found{0};
  if (splits.empty()) {
    TORCH_CHECK_VALUE(length % size == 0, title, ": the first dimension of the ", side, ", ", length,
                      ", is no multiple of the ", size, " ranks. Pass split sizes. [BG403]");
    for (int i = 1; i <= size; ++i) found.push_back(length / size * i);
  } else {
    TORCH_CHECK_VALUE(static_cast<int>(splits.size()) == size, title, ": ", splits.size(), " split sizes of the ", side,
                      " were passed; there must be one for each of the ", size, " ranks. [BG403]");
    for (const int64_t split : splits) {
      TORCH_CHECK_VALUE(split >= 0, title, ": split size ", split, " is negative. [BG403]");
      found.push_back(found.back() + split);
    }
    TORCH_CHECK_VALUE(found.back() == length, title, ": the split sizes of the ", side, " add up to ", found.back(),
                      "; its first dimension is ", length, ". [BG403]");
  }
  const int64_t row = length == 0 ? 0 : tensor.numel() / length;
  for (int64_t& begin : found) begin *= row;
  return found;
}

}  // namespace

void BaguaBackend::add_block(Call* call, Kind kind, const at::Tensor& flat, int64_t begin, int64_t length, int peer,
                             uint32_t tag) const {
  if (length == 0 || peer == seat_.rank) return;
  TransferRequest made = request(kind, element_of(flat.scalar_type()), {}, static_cast<uint64_t>(length));
  made.descriptor.root = peer;
  made.descriptor.tag = tag;
  made.whole = true;
  char* const place = static_cast<char*>(flat.data_ptr()) + begin * static_cast<int64_t>(flat.element_size());
  if (kind == Kind::kSend) {
    made.src = place;
  } else {
    made.dst = place;
  }
  call->plan.requests.push_back(made);
}

TorchWork BaguaBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                      std::vector<int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) {
  Call call{OpType::ALLTOALL_BASE, "bagua:all_to_all", Tensors{input}, opts.timeout, true, {}};
  check_alike(call.title, output, input);
  const std::vector<int64_t> from = begins(call.title, "input", input, input_splits, seat_.size);
  const std::vector<int64_t> to = begins(call.title, "output", output, output_splits, seat_.size);
  const size_t own = static_cast<size_t>(seat_.rank);
  TORCH_CHECK_VALUE(from[own + 1] - from[own] == to[own + 1] - to[own], call.title, ": this rank gives itself ",
                    from[own + 1] - from[own], " elements, and expects ", to[own + 1] - to[own], ". [BG402]");
  const at::Tensor gives = given(&call, input), takes = taken(&call, output);
  const uint32_t tag = kExchangeTag | (exchanges_.fetch_add(1) & (kExchangeTag - 1));
  for (int step = 1; step < seat_.size; ++step) {  // not all to the same rank at once
    const size_t next = static_cast<size_t>((seat_.rank + step) % seat_.size);
    const size_t before = static_cast<size_t>((seat_.rank + seat_.size - step) % seat_.size);
    add_block(&call, Kind::kSend, gives, from[next], from[next + 1] - from[next], static_cast<int>(next), tag);
    add_block(&call, Kind::kRecv, takes, to[before], to[before + 1] - to[before], static_cast<int>(before), tag);
  }
  const int64_t length = to[own + 1] - to[own];
  if (length > 0) {
    copy_plainly(takes.detach().view({-1}).narrow(0, to[own], length),
                 gives.detach().view({-1}).narrow(0, from[own], length));
  }
  call.plan.outputs.push_back(output);
  return begin_apart(std::move(call));
}

TorchWork BaguaBackend::alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) {
  Call call{OpType::ALLTOALL, "bagua:all_to_all", inputs, opts.timeout, true, {}};
  for (const Tensors* list : {&inputs, &outputs}) {
    TORCH_CHECK_VALUE(static_cast<int>(list->size()) == seat_.size, call.title, ": a list has ", list->size(),
                      " tensors; it must have one for each of the ", seat_.size, " ranks of the group. [BG402]");
    for (const at::Tensor& tensor : *list) check_alike(call.title, tensor, inputs.front());
  }
  const size_t own = static_cast<size_t>(seat_.rank);
  TORCH_CHECK_VALUE(inputs[own].numel() == outputs[own].numel(), call.title, ": this rank gives itself ",
                    inputs[own].numel(), " elements, and expects ", outputs[own].numel(), ". [BG402]");
  const uint32_t tag = kExchangeTag | (exchanges_.fetch_add(1) & (kExchangeTag - 1));
  for (int step = 1; step < seat_.size; ++step) {
    const size_t next = static_cast<size_t>((seat_.rank + step) % seat_.size);
    const size_t before = static_cast<size_t>((seat_.rank + seat_.size - step) % seat_.size);
    add_block(&call, Kind::kSend, given(&call, inputs[next]), 0, inputs[next].numel(), static_cast<int>(next), tag);
    add_block(&call, Kind::kRecv, taken(&call, outputs[before]), 0, outputs[before].numel(), static_cast<int>(before),
              tag);
  }
  copy_plainly(taken(&call, outputs[own]).detach().view({-1}), given(&call, inputs[own]).detach().view({-1}));
  call.plan.outputs = outputs;
  return begin_apart(std::move(call));
}

TorchWork BaguaBackend::point_to_point(Call call, Kind kind, const at::Tensor& tensor, int peer, int tag) {
  TORCH_CHECK_VALUE(peer >= kAnySource && peer < seat_.size && peer != seat_.rank, call.title, ": rank ", peer,
                    " of the group must be one of the other ", seat_.size - 1, ". [BG404]");
  TORCH_CHECK_VALUE(tag >= 0, call.title, ": tag ", tag, " is negative. [BG501]");
  const at::Tensor used = kind == Kind::kSend ? given(&call, tensor) : taken(&call, tensor);
  TransferRequest made = request(kind, tensor);
  made.descriptor.root = call.plan.root = peer;
  made.descriptor.tag = static_cast<uint32_t>(tag);
  made.whole = true;
  if (kind == Kind::kSend) {
    made.src = static_cast<char*>(used.data_ptr());
  } else {
    made.dst = static_cast<char*>(used.data_ptr());
  }
  call.plan.requests.push_back(made);
  call.plan.outputs.push_back(tensor);
  return begin_apart(std::move(call));
}

TorchWork BaguaBackend::send(Tensors& tensors, int dst, int tag) {
  Call call{OpType::SEND, "bagua:send", tensors, ::c10d::kUnsetTimeout, true, {}};
  TORCH_CHECK_VALUE(tensors.size() == 1 && dst >= 0, call.title,
                    ": it takes one tensor, and a rank of the group. [BG410]");
  return point_to_point(std::move(call), Kind::kSend, tensors.front(), dst, tag);
}

TorchWork BaguaBackend::recv(Tensors& tensors, int src, int tag) {
  Call call{OpType::RECV, "bagua:recv", tensors, ::c10d::kUnsetTimeout, true, {}};
  TORCH_CHECK_VALUE(tensors.size() == 1 && src >= 0, call.title,
                    ": it takes one tensor, and a rank of the group. [BG410]");
  return point_to_point(std::move(call), Kind::kRecv, tensors.front(), src, tag);
}

TorchWork BaguaBackend::recvAnysource(Tensors& tensors, int tag) {
  Call call{OpType::RECVANYSOURCE, "bagua:recvAnySource", tensors, ::c10d::kUnsetTimeout, true, {}};
  TORCH_CHECK_VALUE(tensors.size() == 1, call.title, ": it takes one tensor. [BG410]");
  return point_to_point(std::move(call), Kind::kRecv, tensors.front(), kAnySource, tag);
}

}  // namespace bagua::dist
