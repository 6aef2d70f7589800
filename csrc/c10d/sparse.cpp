// All-reduce of sparse tensors, which DDP needs for sparse gradients: all ranks gather the entries of all, and add them
// up.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "c10d/backend.h"

namespace bagua::dist {

at::Tensor BaguaBackend::gathered(const char* title, const at::Tensor& own, Milliseconds timeout) {
  Call call{::c10d::OpType::ALLGATHER, title, std::nullopt, timeout, false, {}};
  std::vector<int64_t> sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), seat_.size);
  const at::Tensor all = at::empty(sizes, own.options());
  add_allgather(&call, all, own);
  begin(std::move(call))->wait(kNoTimeout);
  return all;
}

TorchWork BaguaBackend::allreduce_of_sparse(const at::Tensor& tensor, const ::c10d::AllreduceOptions& opts) {
  Call call{::c10d::OpType::ALLREDUCE, "bagua:all_reduce", Tensors{tensor}, opts.timeout, true, {}};
  const auto op = static_cast<::c10d::ReduceOp::RedOpType>(opts.reduceOp);
  TORCH_CHECK_VALUE(op == ::c10d::ReduceOp::SUM, call.title, ": sparse tensors can be reduced with SUM alone. [BG405]");
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.layout() == at::kSparse, call.title, ": the tensor is ",
                    tensor.layout(), " on ", tensor.device(), ". Pass tensor.to_dense(). [BG401]");
  const at::NoGradGuard no_grad;
  const at::Tensor own = tensor.coalesce();
  const at::Tensor own_indices = own.indices(), own_values = own.values();
  const int64_t entries = own_values.size(0);
  const at::Tensor counts = gathered(call.title, at::tensor({entries}, at::kLong), opts.timeout);
  const int64_t most = counts.max().item<int64_t>();

  const at::Tensor indices = at::zeros({own.sparse_dim(), most}, at::kLong);
  indices.narrow(1, 0, entries).copy_(own_indices);
  std::vector<int64_t> sizes = own_values.sizes().vec();
  sizes[0] = most;
  const at::Tensor values = at::zeros(sizes, own_values.options());
  values.narrow(0, 0, entries).copy_(own_values);
  const at::Tensor all_indices = gathered(call.title, indices, opts.timeout);
  const at::Tensor all_values = gathered(call.title, values, opts.timeout);

  Tensors used_indices, used_values;
  for (int64_t rank = 0; rank < seat_.size; ++rank) {
    const int64_t count = counts[rank].item<int64_t>();
    used_indices.push_back(all_indices[rank].narrow(1, 0, count));
    used_values.push_back(all_values[rank].narrow(0, 0, count));
  }
  const at::Tensor sum = at::sparse_coo_tensor(at::cat(used_indices, 1), at::cat(used_values, 0), own.sizes());
  copy_plainly(tensor, sum.coalesce());
  call.plan.requests.push_back(request(Kind::kBarrier, {DType::kU8, 1}, {}, 0));
  call.plan.outputs.push_back(tensor);
  return begin(std::move(call));
}

}  // namespace bagua::dist
