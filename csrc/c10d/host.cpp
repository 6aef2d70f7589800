#include "c10d/host.h"

#include <c10/util/Exception.h>

#include <utility>

namespace bagua::dist {

namespace {

// Stages are kept for as many bytes as a step of a large model needs at once.
constexpr uint64_t kLargestStage = 64 << 20, kMostStages = 256 << 20;

[[noreturn]] void fail(const HostError& error) {
  TORCH_CHECK_WITH(DistBackendError, false, error.text);
}

Progress progress_of(int code, const HostError& error) {
  switch (code) {
    case kHostOk:
      return Progress::kMade;
    case kHostTimeout:
      return Progress::kLate;
    case kHostBusy:
      return Progress::kBusy;
    case kHostInterrupted:
      return Progress::kInterrupted;
    default:
      fail(error);
  }
}

}  // namespace

Host::Host(const HostApi& api, std::shared_ptr<void> keeper, std::function<std::string()> describe)
    : api_(api),
      keeper_(std::move(keeper)),
      describe_(std::move(describe)),
      stages_(api_.make_stages(api_.client, kLargestStage, kMostStages)) {}

Host::~Host() {
  api_.free_stages(stages_);
}

void* Host::alloc(uint64_t bytes, uint64_t* segment) const {
  HostError error;
  void* data = nullptr;
  uint64_t size = 0;
  return api_.alloc(api_.client, bytes, segment, &data, &size, &error) == kHostOk ? data : nullptr;
}

void Host::free(uint64_t segment) const {
  HostError error;
  api_.free(api_.client, segment, &error);
}

Move::Move(std::shared_ptr<Host> host, const TransferRequest& request)
    : host_(std::move(host)), transfer_(host_->api().make_transfer(host_->api().client, host_->stages(), &request)) {}

Move::~Move() {
  host_->api().free_transfer(transfer_);
}

bool Move::start() {
  HostError error;
  progress_of(host_->api().start_transfer(transfer_, &error), error);
  return host_->api().state_of_transfer(transfer_).submitted;
}

Progress Move::step(int64_t deadline_ns, Interrupt interrupt) {
  HostError error;
  return progress_of(host_->api().step_transfer(transfer_, deadline_ns, interrupt.ask, interrupt.context, &error),
                     error);
}

Progress Move::run(int64_t deadline_ns, Interrupt interrupt) {
  HostError error;
  return progress_of(host_->api().run_transfer(transfer_, deadline_ns, interrupt.ask, interrupt.context, &error),
                     error);
}

bool Move::over() const {
  return host_->api().state_of_transfer(transfer_).over;
}

int Move::source() const {
  return host_->api().state_of_transfer(transfer_).source;
}

}  // namespace bagua::dist
