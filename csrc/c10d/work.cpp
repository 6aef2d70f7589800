#include "c10d/work.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "base/clock.h"
#include "c10d/helpers.h"

namespace bagua::dist {

namespace {

constexpr int64_t kBusyNs = 1 * kNsPerMs;  // until slots of the channel may be free again

std::exception_ptr error_of(const std::string& text) {
  try {
    TORCH_CHECK_WITH(DistBackendError, false, text);
  } catch (...) {
    return std::current_exception();
  }
}

int64_t earlier(int64_t a, int64_t b) {
  return a < 0 ? b : b < 0 ? a : std::min(a, b);
}

std::string seconds_text(int64_t ns) {
  std::string text = std::to_string(static_cast<double>(ns / kNsPerMs) / 1000.0);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

}  // namespace

void copy_plainly(const at::Tensor& to, const at::Tensor& from) {
  const c10::InferenceMode guard(to.is_inference() || c10::InferenceMode::is_enabled());
  const at::NoGradGuard no_grad;
  to.copy_(from);
}

BaguaWork::BaguaWork(std::shared_ptr<Queue> queue, std::shared_ptr<Host> host, int rank, ::c10d::OpType type,
                     const char* title, const std::optional<std::vector<at::Tensor>>& inputs, Plan plan,
                     int64_t timeout_ns, uint64_t sequence)
    : Work(rank, type, title, inputs),
      queue_(std::move(queue)),
      title_(title),
      plan_(std::move(plan)),
      timeout_ns_(timeout_ns),
      deadline_ns_(timeout_ns < 0 ? -1 : now_ns() + timeout_ns),
      sequence_(sequence),
      source_(plan_.root) {
  moves_.reserve(plan_.requests.size());
  for (const TransferRequest& request : plan_.requests) moves_.push_back(std::make_unique<Move>(host, request));
}

bool BaguaWork::may_start(size_t move) const {
  return move == 0 || move <= next_ || move > plan_.afters.size() || !plan_.afters[move - 1];
}

void BaguaWork::after(size_t move) {
  if (move < plan_.afters.size() && plan_.afters[move]) plan_.afters[move]();
}

bool BaguaWork::start() {
  begun_ = true;
  while (submitted_ < moves_.size() && may_start(submitted_) && moves_[submitted_]->start()) ++submitted_;
  return submitted_ == moves_.size();
}

Progress BaguaWork::step(int64_t deadline_ns, Interrupt interrupt) {
  if (next_ == moves_.size()) return Progress::kMade;
  Move& move = *moves_[next_];
  const Progress made = move.step(deadline_ns, interrupt);
  if (!move.over()) return made;
  if (plan_.root < 0 && move.source() >= 0) source_ = move.source();
  after(next_);
  submitted_ = std::max(submitted_, ++next_);
  return made;
}

Progress BaguaWork::run_alone(int64_t deadline_ns, Interrupt interrupt) {
  begun_ = true;
  while (next_ < moves_.size()) {
    if (const Progress made = moves_[next_]->run(deadline_ns, interrupt); made != Progress::kMade) return made;
    after(next_);
    submitted_ = ++next_;
  }
  return Progress::kMade;
}

void BaguaWork::copy_out() {
  if (plan_.copies.empty()) return;
  const c10::OptionalStreamGuard guard(plan_.stream);
  for (auto& [to, from] : plan_.copies) copy_plainly(to, from);
  if (plan_.stream) plan_.stream->synchronize();  // whoever waits may work on another stream
}

void BaguaWork::complete() {
  FuturePtr future;
  {
    const Lock lock(queue_->mutex_);
    future = future_;
    told_ = true;
  }
  if (why_not_ && begun_ && next_ < moves_.size()) {
    // It was given up, and the daemon may still come to it: memory that it names stays for the life of the process.
    new std::vector<std::unique_ptr<Move>>(std::move(moves_));
    new std::vector<at::Tensor>(std::move(plan_.held));
  }
  moves_.clear();
  plan_.held.clear();
  plan_.copies.clear();
  plan_.afters.clear();
  Work::finish(why_not_);
  if (future == nullptr) return;
  if (why_not_) {
    future->setErrorIfNeeded(why_not_);
  } else {
    future->markCompleted(c10::IValue(plan_.outputs));
  }
}

bool BaguaWork::isCompleted() {
  return queue_->poll(this);
}

bool BaguaWork::isSuccess() const {
  return queue_->succeeded(this);
}

bool BaguaWork::wait(std::chrono::milliseconds timeout) {
  const int64_t deadline = timeout <= kNoTimeout ? -1 : now_ns() + static_cast<int64_t>(timeout.count()) * kNsPerMs;
  if (!queue_->wait(this, deadline)) {
    TORCH_CHECK_WITH(DistBackendError, false, title_, " was not done after ", timeout.count(), " ms. ",
                     queue_->host_->describe_waits(), " [BG503]");
  }
  return true;
}

void BaguaWork::abort() {
  queue_->fail(title_ + " was aborted on this rank [BG512]");
}

void BaguaWork::end_with_group(const std::string& what) {
  queue_->fail(title_ + ": the group was " + what + " on this rank [BG512]");
}

int BaguaWork::sourceRank() const {
  return source_;
}

BaguaWork::FuturePtr BaguaWork::getFuture() {
  return queue_->future(this);
}

void Queue::refuse_fork(const std::string& title) const {
  TORCH_CHECK_WITH(DistBackendError, !in_fork(), title, ": the group belongs to process ", pid_,
                   ", of which this process is a fork. Communicate in the process that made the group. [BG501]");
}

void Queue::add(const WorkPtr& work, bool alone) {
  refuse_fork(work->title_);
  Lock lock(mutex_);
  if (broken_) {
    work->over_ = true;
    work->why_not_ = broken_;
    lock.unlock();
    return work->complete();
  }
  works_.push_back(work);
  if (alone && works_.size() == 1 && !driven_) return run_alone(&lock, work);
  try {
    if (submitted_ + 1 == works_.size()) advance();
  } catch (...) {
    works_.pop_back();
    throw;
  }
  if (needs_driver()) ask_helper();
}

// A small collective needs no daemon where all ranks run it at once.
void Queue::run_alone(Lock* lock, const WorkPtr& work) {
  driven_ = true;
  lock->unlock();
  std::exception_ptr why_not;
  Progress made = Progress::kMade;
  try {
    made = work->run_alone(work->deadline_ns_, interrupt(true));
    if (made == Progress::kMade) work->copy_out();
  } catch (...) {
    why_not = std::current_exception();
  }
  lock->lock();
  if (made == Progress::kLate) late(*work);
  if (made != Progress::kMade && !why_not) why_not = broken_;
  if (why_not || made == Progress::kMade) finish(work, why_not);
  leave();
  lock->unlock();
  if (why_not || made == Progress::kMade) {
    work->complete();
  } else if (made == Progress::kInterrupted) {
    raise_signal();
  }
}

Interrupt Queue::interrupt(bool interruptible) {
  const auto aborted = [](void* queue) { return static_cast<Queue*>(queue)->aborted_.load(); };
  const auto aborted_or_signalled = [](void* queue) {
    return static_cast<Queue*>(queue)->aborted_.load() || signalled();
  };
  return {interruptible ? +aborted_or_signalled : +aborted, this};
}

void Queue::advance() {
  while (submitted_ < works_.size() && works_[submitted_]->start()) ++submitted_;
}

bool Queue::needs_driver() const {
  return !driven_ && !helper_asked_ && !works_.empty() && (submitted_ < works_.size() || futures_ > 0 || broken_);
}

void Queue::ask_helper() {
  helper_asked_ = true;
  Helpers::get().call([self = shared_from_this()] { self->help(); });
}

void Queue::leave() {
  driven_ = false;
  changed_.notify_all();
  if (needs_driver()) ask_helper();
}

void Queue::finish(const WorkPtr& work, std::exception_ptr why_not) {
  works_.pop_front();
  if (submitted_ > 0) --submitted_;
  if (work->future_ != nullptr) --futures_;
  work->why_not_ = why_not;
  work->over_ = true;
  if (why_not && !broken_) broken_ = why_not;  // what follows it would meet others' operations of another place
}

void Queue::late(const BaguaWork& work) {
  if (broken_) return;
  mutex_.unlock();
  const std::string waits = host_->describe_waits();
  mutex_.lock();
  broken_ = error_of(work.title_ + " was not done within its timeout of " + seconds_text(work.timeout_ns_) + ". " +
                     waits + " [BG503]");
}

WorkPtr Queue::step(Lock* lock, int64_t deadline_ns, bool interruptible) {
  const WorkPtr first = works_.front();
  std::exception_ptr why_not = broken_;
  Progress made = Progress::kMade;
  if (!why_not) {
    try {
      advance();
    } catch (...) {
      why_not = std::current_exception();
    }
  }
  if (!why_not) {
    lock->unlock();
    bool over = false;
    try {
      made = first->step(earlier(deadline_ns, first->deadline_ns_), interrupt(interruptible));
      over = first->next_ == first->moves_.size();
      if (over) first->copy_out();
    } catch (...) {
      why_not = std::current_exception();
    }
    lock->lock();
    if (why_not && aborted_.load()) why_not = broken_;  // that is why it failed
    if (!why_not && !over) {
      if (made == Progress::kBusy) changed_.wait_for(*lock, std::chrono::nanoseconds(kBusyNs));
      if (made == Progress::kLate && first->deadline_ns_ >= 0 && now_ns() >= first->deadline_ns_) late(*first);
      if (made == Progress::kInterrupted && !broken_) {
        leave();
        lock->unlock();
        raise_signal();
      }
      if (!broken_) return nullptr;
      why_not = broken_;
    }
  }
  finish(first, why_not);
  return first;
}

bool Queue::wait(BaguaWork* work, int64_t deadline_ns) {
  refuse_fork(work->title_);
  Lock lock(mutex_);
  while (!work->over_) {
    if (deadline_ns >= 0 && now_ns() >= deadline_ns) return false;
    if (driven_) {
      const auto slice = std::chrono::milliseconds(100);
      const auto limit =
          deadline_ns < 0 ? std::chrono::nanoseconds(slice)
                          : std::min<std::chrono::nanoseconds>(slice, std::chrono::nanoseconds(deadline_ns - now_ns()));
      if (changed_.wait_for(lock, limit) == std::cv_status::timeout) {
        lock.unlock();
        if (signalled()) raise_signal();
        lock.lock();
      }
      continue;
    }
    driven_ = true;
    WorkPtr done;
    while (done == nullptr && !work->over_ && (deadline_ns < 0 || now_ns() < deadline_ns)) {
      done = step(&lock, deadline_ns, true);
    }
    leave();
    if (done == nullptr) continue;
    const bool others = done.get() != work && done->future_ != nullptr;
    lock.unlock();
    if (others) {
      Helpers::get().call([done] { done->complete(); });
    } else {
      done->complete();
    }
    done.reset();
    lock.lock();
  }
  const std::exception_ptr why_not = work->why_not_;
  lock.unlock();
  if (why_not) std::rethrow_exception(why_not);
  return true;
}

bool Queue::poll(BaguaWork* work) {
  if (in_fork()) return work->over_;
  Lock lock(mutex_);
  while (!work->over_ && !driven_) {
    driven_ = true;
    WorkPtr done = step(&lock, 0, true);
    leave();
    if (done == nullptr) break;
    lock.unlock();
    done->complete();
    done.reset();
    lock.lock();
  }
  return work->over_;
}

void Queue::help() {
  Lock lock(mutex_);
  helper_asked_ = false;
  while (needs_driver()) {
    driven_ = true;
    WorkPtr done = step(&lock, -1, false);
    if (done == nullptr) {
      driven_ = false;
      continue;
    }
    driven_ = false;
    changed_.notify_all();
    // The callbacks of its future may take long, or wait for other works.
    if (done->future_ != nullptr && needs_driver()) ask_helper();
    lock.unlock();
    done->complete();
    done.reset();
    lock.lock();
  }
  changed_.notify_all();
}

BaguaWork::FuturePtr Queue::future(BaguaWork* work) {
  refuse_fork(work->title_);
  Lock lock(mutex_);
  if (work->future_ != nullptr) return work->future_;
  work->future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  const BaguaWork::FuturePtr future = work->future_;
  if (!work->over_) {
    ++futures_;
    if (needs_driver()) ask_helper();
  }
  if (!work->told_) return future;  // complete() marks it
  const std::exception_ptr why_not = work->why_not_;
  lock.unlock();
  if (why_not) {
    future->setErrorIfNeeded(why_not);
  } else {
    future->markCompleted(c10::IValue(work->plan_.outputs));
  }
  return future;
}

bool Queue::succeeded(const BaguaWork* work) {
  const Lock lock(mutex_);
  return work->over_ && !work->why_not_;
}

void Queue::fail(const std::string& why) {
  const Lock lock(mutex_);
  if (!broken_) broken_ = error_of(why);
  aborted_.store(true);
  if (needs_driver()) ask_helper();
}

}  // namespace bagua::dist
