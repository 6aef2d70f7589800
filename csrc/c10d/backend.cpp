#include "c10d/backend.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <utility>

#include "base/clock.h"
#include "c10d/joint_work.h"

namespace bagua::dist {

namespace {

std::atomic<uint64_t> allocated{0};

constexpr size_t kMostApart = 256;  // sends and receives that nobody may have waited for, before they are looked at

bool plain(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj();
}

// Whether the tensors lie one behind the other.
bool in_a_row(const Tensors& list) {
  const char* next = nullptr;
  for (const at::Tensor& tensor : list) {
    if (!plain(tensor) || (next != nullptr && tensor.data_ptr() != next)) return false;
    next = static_cast<const char*>(tensor.data_ptr()) + tensor.nbytes();
  }
  return true;
}

void check(const char* title, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), title, ": a tensor is missing. [BG401]");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, title, ": the tensor is ", tensor.layout(),
                    ". Pass tensor.to_dense(). [BG401]");
  TORCH_CHECK_VALUE(tensor.device().is_cpu() || tensor.device().is_cuda(), title, ": the tensor is on device ",
                    tensor.device(), ". Pass one on the CPU or on a CUDA device. [BG401]");
}

// Of a tensor that is written.
void check_written(const char* title, const at::Tensor& tensor) {
  check(title, tensor);
  TORCH_CHECK_VALUE(tensor.numel() == 0 || at::has_internal_overlap(tensor) != at::MemOverlap::Yes, title,
                    ": several elements of the tensor are one place in memory, as expand() makes them. Pass "
                    "tensor.clone(). [BG401]");
}

}  // namespace

BaguaBackend::BaguaBackend(std::shared_ptr<Host> host, Seat seat, Milliseconds timeout)
    : Backend(seat.rank, seat.size),
      host_(std::move(host)),
      seat_(std::move(seat)),
      collectives_(std::make_shared<Queue>(host_, seat_.keeper)),
      timeout_ms_(timeout.count()) {}

uint64_t BaguaBackend::allocations() {
  return allocated.load();
}

at::Tensor BaguaBackend::allocateTensor(long size, at::TensorOptions options) {
  ++allocated;
  const uint64_t bytes = static_cast<uint64_t>(size) * options.dtype().itemsize();
  uint64_t segment = 0;
  void* data = bytes == 0 || !options.device().is_cpu() ? nullptr : host_->alloc(bytes, &segment);
  if (data == nullptr) return at::empty({size}, options);
  const auto give_back = [host = host_, segment](void*) { host->free(segment); };
  return at::from_blob(data, {size}, give_back, options);
}

void BaguaBackend::end_all(const std::string& what) {
  collectives_->fail("the group was " + what + " on this rank [BG512]");
  const Lock lock(mutex_);
  for (const WorkPtr& work : apart_) work->end_with_group(what);
}

void BaguaBackend::shutdown() {
  {
    const Lock lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  reap();
  end_all("destroyed");
  if (seat_.shut_down) seat_.shut_down();
}

void BaguaBackend::startCoalescing() {
  const Lock lock(mutex_);
  coalescing_ = true;
  coalesced_.clear();  // of a block that an exception ended
}

TorchWork BaguaBackend::endCoalescing() {
  const Lock lock(mutex_);
  coalescing_ = false;
  return c10::make_intrusive<JointWork>(std::exchange(coalesced_, {}));
}

TransferRequest BaguaBackend::request(Kind kind, const Element& element, const at::Tensor& shape,
                                      uint64_t count) const {
  TransferRequest request;
  Descriptor& d = request.descriptor;
  d.kind = static_cast<uint8_t>(kind);
  d.dtype = static_cast<uint8_t>(element.dtype);
  d.comm = seat_.comm;
  d.count = count * element.per;
  d.root = -1;
  if (shape.defined() && shape.dim() <= kMaxDims) {
    d.ndim = static_cast<uint8_t>(shape.dim());
    for (int64_t i = 0; i < shape.dim(); ++i) d.dims[i] = shape.size(i);
  }
  request.generation = seat_.generation;
  request.rows = true;
  return request;
}

at::Tensor BaguaBackend::on_host(Call* call, const at::Tensor& tensor, bool read, bool written) const {
  written ? check_written(call->title, tensor) : check(call->title, tensor);
  call->on_device = call->on_device || !tensor.device().is_cpu();
  at::Tensor used = tensor;
  if (!plain(tensor)) {
    used = at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU));
    if (read) used.copy_(tensor.detach());
    if (written) call->plan.copies.emplace_back(tensor.detach(), used);
  }
  call->plan.held.push_back(used);
  return used;
}

namespace {

void check_list(const char* title, const Tensors& list, const at::Tensor& like, int size) {
  TORCH_CHECK_VALUE(static_cast<int>(list.size()) == size, title, ": the list has ", list.size(),
                    " tensors; it must have one for each of the ", size, " ranks of the group. [BG402]");
  for (const at::Tensor& tensor : list) {
    check(title, tensor);
    check_alike(title, tensor, like);
    TORCH_CHECK_VALUE(tensor.numel() == like.numel(), title, ": tensors have ", tensor.numel(), " and ", like.numel(),
                      " elements. All must have the same number. [BG402]");
    TORCH_CHECK_VALUE(tensor.device() == like.device(), title, ": tensors are on ", tensor.device(), " and on ",
                      like.device(), ". All must be on one device. [BG402]");
  }
}

}  // namespace

at::Tensor BaguaBackend::list_of(Call* call, const Tensors& list, const at::Tensor& like, bool written) const {
  check_list(call->title, list, like, seat_.size);
  for (const at::Tensor& tensor : list) {
    if (written) check_written(call->title, tensor);
  }
  if (in_a_row(list)) {
    call->plan.held.insert(call->plan.held.end(), list.begin(), list.end());
    return list.front();
  }
  call->on_device = call->on_device || !like.device().is_cpu();
  const at::Tensor flat = at::empty({seat_.size, like.numel()}, like.options().device(at::kCPU));
  for (int i = 0; i < seat_.size; ++i) {
    const at::Tensor one = list[static_cast<size_t>(i)].detach();
    if (written) {
      call->plan.copies.emplace_back(one, flat[i].view(one.sizes()));
    } else {
      flat[i].copy_(one.reshape({-1}));
    }
  }
  call->plan.held.push_back(flat);
  return flat;
}

TorchWork BaguaBackend::begin(Call call) {
  return begin_in(collectives_, std::move(call), sequence_.fetch_add(1) + 1);
}

TorchWork BaguaBackend::begin_apart(Call call) {
  reap();
  return begin_in(std::make_shared<Queue>(host_, seat_.keeper), std::move(call), 0);
}

TorchWork BaguaBackend::begin_in(const std::shared_ptr<Queue>& queue, Call call, uint64_t sequence) {
  const bool apart = queue != collectives_;
  const bool one = call.plan.requests.size() == 1 || (call.plan.requests.size() == 2 && !call.plan.afters.empty());
  const bool on_device = call.on_device;
  const bool alone = !call.asynchronous && one && !on_device;
  for (const auto& [to, from] : call.plan.copies) {
    if (to.device().is_cpu()) continue;
    call.plan.stream = c10::impl::VirtualGuardImpl(to.device().type()).getStream(to.device());
    break;
  }
  const int64_t timeout_ms = call.timeout.count() < 0 ? timeout_ms_.load() : call.timeout.count();
  const WorkPtr work =
      c10::make_intrusive<BaguaWork>(queue, host_, seat_.rank, call.type, call.title, call.inputs, std::move(call.plan),
                                     timeout_ms <= 0 ? -1 : timeout_ms * kNsPerMs, sequence);
  {
    const Lock lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, !closed_, call.title, ": the group was destroyed. [BG407]");
    if (apart) apart_.push_back(work);
    if (coalescing_) coalesced_.push_back(work);
  }
  queue->add(work, alone);
  // A collective waits here. A receive must not: the send of the other side may come after it in its program.
  if (on_device && !apart) work->wait(kNoTimeout);
  return work;
}

// Frees what is done of sends and receives, so that works which nobody waits for end, too.
void BaguaBackend::reap() {
  std::deque<WorkPtr> apart;
  {
    const Lock lock(mutex_);
    if (apart_.empty()) return;
    apart.swap(apart_);
  }
  std::deque<WorkPtr> left;
  const size_t looked_at = apart.size() > kMostApart ? apart.size() : std::min<size_t>(apart.size(), 4);
  for (size_t i = 0; i < apart.size(); ++i) {
    if (i >= looked_at || !apart[i]->isCompleted()) left.push_back(apart[i]);
  }
  const Lock lock(mutex_);
  apart_.insert(apart_.begin(), left.begin(), left.end());
}

}  // namespace bagua::dist
