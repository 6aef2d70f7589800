// Operations of a rank: submitted, or done in a meeting, and waited for.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "channel/client.h"

namespace bagua {

namespace {

constexpr uint32_t kLookForDaemon = 16;  // meetings between two looks

// Holds a note for others in a place, until the end of the block. No place: nothing is noted.
template <class T>
class Note {
 public:
  Note(std::atomic<T>* place, T note) : place_(place) {
    if (place_ != nullptr) place_->store(note, std::memory_order_relaxed);
  }
  ~Note() {
    if (place_ != nullptr) place_->store(T(), std::memory_order_relaxed);
  }
  Note(const Note&) = delete;
  Note& operator=(const Note&) = delete;

 private:
  std::atomic<T>* const place_;
};

// Not of a forked child: this rank's channel is none of its business.
bool on_main_thread() {
  static thread_local const bool main = syscall(SYS_gettid) == getpid();
  return main;
}

// By all members of its communicator, in order.
bool matched(const Descriptor& descriptor) {
  const Kind kind = static_cast<Kind>(descriptor.kind);
  return kind != Kind::kSend && kind != Kind::kRecv;
}

}  // namespace

void ChannelClient::note_members(uint32_t comm, const std::vector<int>& ranks, uint32_t room) {
  Group group;
  bool found = false;
  for (uint32_t i = 0; i < local_ranks_.size(); ++i) {
    const int rank = local_ranks_[i];
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) continue;
    ++group.local_members;
    found = found || rank == view_.rank;
    if (rank == view_.rank) {
      group.own = i;
    } else {
      group.others.push_back(i);
    }
  }
  group.one_host = comm == 0 ? view_.hosts.size() == 1 : group.local_members == ranks.size();
  group.counted = found && comm < kArrivalComms;
  const bool alone = (comm == 0 ? view_.members.size() : ranks.size()) == 1;
  const auto own = static_cast<size_t>(std::find(ranks.begin(), ranks.end(), view_.rank) - ranks.begin());
  if (alone || (room != 0 && own < ranks.size() && ranks.size() <= kMeetingRanks)) {
    group.meeting = std::make_shared<Meeting>(&page()->counters, sheet(), room, static_cast<uint32_t>(own),
                                              static_cast<uint32_t>(ranks.size()), meeting_waits_);
  }
  groups_[comm] = std::move(group);
}

std::shared_ptr<Meeting> ChannelClient::meeting_of(uint32_t comm) {
  const Lock lock(submit_mutex_);
  const auto found = groups_.find(comm);
  return found == groups_.end() ? nullptr : found->second.meeting;
}

bool ChannelClient::daemon_works_for(uint32_t comm) {
  const auto found = groups_.find(comm);
  if (found == groups_.end()) return false;
  const uint64_t last = found->second.last_ticket;
  const auto index = static_cast<uint32_t>(last % kSlots);
  return last != 0 && tickets_[index] == last &&
         !is_over(channel()->slots[index].state.load(std::memory_order_acquire));
}

bool ChannelClient::on_one_host(uint32_t comm) {
  const Lock lock(submit_mutex_);
  const auto found = groups_.find(comm);
  return found != groups_.end() && found->second.one_host;
}

bool ChannelClient::completes(uint32_t comm, Group* group) {
  if (!group->counted) return true;
  std::atomic<uint64_t>* const counts = sheet()->arrivals[comm].submitted;
  const uint64_t mine = ++group->submitted;
  counts[group->own].store(mine);
  for (const uint32_t other : group->others) {
    if (counts[other].load() < mine) return false;
  }
  return true;
}

Status ChannelClient::left_behind() const {
  return {Code::kRegrouped, "this operation began in a generation before " + std::to_string(generation())};
}

Status ChannelClient::meet_now(const Descriptor& descriptor, uint64_t generation, const char* src, char* dst,
                               const Interrupt& interrupt, bool* tried, bool* met, int64_t* met_ns) {
  const std::shared_ptr<Meeting> meeting = meeting_of(descriptor.comm);
  if (meeting == nullptr || !meeting->accepts(descriptor)) return Status::ok();
  if (meeting->thread.load(std::memory_order_relaxed) == Meeting::this_thread()) {
    return {Code::kInvalid,
            "a signal handler called a collective operation while its thread is in another one of communicator " +
                std::to_string(descriptor.comm) + ": note the signal, and call it after that one"};
  }
  {
    const Lock lock(submit_mutex_);
    if (daemon_works_for(descriptor.comm)) return Status::ok();
  }
  *tried = true;
  const ReaderLock same_page(sheet_mutex_);
  if (Status status = check_usable(); !status) return status;
  const Lock one(meeting->mutex);
  const Note noted(&meeting->thread, Meeting::this_thread());
  if (generation != this->generation()) return left_behind();
  const uint32_t number = ++meeting->calls;
  const auto usable = [this] {
    if (Status status = check_usable(); !status) return status;
    return daemon_gone() ? daemon_lost() : Status::ok();
  };
  // Ranks that always meet would not hear that the daemon was started again.
  if (elastic_.load(std::memory_order_relaxed) && number % kLookForDaemon == 0 && daemon_gone()) return daemon_lost();
  const Status status = meeting->attend(number, descriptor, src, dst, usable, interrupt, met);
  *met_ns = meeting->met_ns();
  return status;
}

uint32_t ChannelClient::fill_slot(const Descriptor& descriptor, SlotState state, uint64_t* ticket) {
  const uint32_t index = free_.back();
  free_.pop_back();
  *ticket = next_ticket_++ * kSlots + index;
  tickets_[index] = *ticket;
  Slot* slot = &channel()->slots[index];
  slot->descriptor = descriptor;
  slot->generation = static_cast<uint32_t>(generation());
  slot->submitted_ns = now_ns();
  slot->state.store(state, std::memory_order_relaxed);
  return index;
}

bool ChannelClient::hand_over(uint32_t index, bool counted) {
  if (!on_main_thread()) channel()->other_threads.store(1, std::memory_order_relaxed);
  const Descriptor& descriptor = channel()->slots[index].descriptor;
  const uint64_t tail = channel()->tail.load(std::memory_order_relaxed);
  channel()->ring[tail % kSlots] = index;
  channel()->tail.store(tail + 1, std::memory_order_release);
  const auto found = groups_.find(descriptor.comm);
  if (!matched(descriptor) || found == groups_.end()) return true;
  Group* const group = &found->second;
  group->last_ticket = tickets_[index];
  if (!counted && group->meeting != nullptr) group->meeting->stay_away(++group->meeting->calls, descriptor);
  return completes(descriptor.comm, group);
}

Status ChannelClient::submit(std::initializer_list<const Descriptor*> descriptors, uint64_t* tickets,
                             const Submission& how) {
  if (Status status = check_usable(); !status) return status;
  {
    const Lock lock(submit_mutex_);
    if (how.generation != 0 && how.generation != generation()) return left_behind();
    if (free_.size() < descriptors.size()) free_abandoned();
    if (free_.size() < descriptors.size()) {
      return {Code::kResource, std::to_string(kSlots) +
                                   " operations have been submitted and not been waited for: wait for the older ones"};
    }
    if (defer(descriptors, tickets, how)) return Status::ok();
    bool complete = false;
    if (descriptors.size() > 0) complete = submit_deferred((*descriptors.begin())->comm);  // they come first
    for (const Descriptor* descriptor : descriptors) {
      complete |= hand_over(fill_slot(*descriptor, kSubmitted, tickets++), how.counted);
    }
    if (!complete && sheet()->status.load() == kRunning) return Status::ok();
  }
  if (how.ring != nullptr) {
    *how.ring = true;
  } else {
    this->ring();
  }
  return Status::ok();
}

bool ChannelClient::defer(std::initializer_list<const Descriptor*> descriptors, uint64_t* tickets,
                          const Submission& how) {
  if (descriptors.size() == 0 || how.defer == Submission::Defer::kNever) return false;
  if (how.defer == Submission::Defer::kBehind && !defers_any((*descriptors.begin())->comm)) return false;
  std::vector<Deferred> all;
  for (const Descriptor* descriptor : descriptors) {
    Deferred one{0, generation(), now_ns(), *descriptor, nullptr, nullptr};
    if (!may_defer(*descriptor, &one)) return false;
    all.push_back(one);
  }
  size_t number = 0;
  for (const Descriptor* descriptor : descriptors) {
    fill_slot(*descriptor, kDeferred, &tickets[number]);
    all[number].ticket = tickets[number];
    deferred_.push_back(all[number++]);
  }
  return true;
}

bool ChannelClient::may_defer(const Descriptor& d, Deferred* out) {
  const auto found = groups_.find(d.comm);
  if (found == groups_.end() || found->second.meeting == nullptr || !found->second.meeting->accepts(d)) return false;
  if (daemon_works_for(d.comm)) return false;
  if (static_cast<Kind>(d.kind) != Kind::kAllReduce) return false;  // others may read or write nothing on some ranks
  const uint64_t bytes = d.count * dtype_size(static_cast<DType>(d.dtype));
  out->src = address_of(d.src_segment, d.src_offset, bytes);
  out->dst = address_of(d.dst_segment, d.dst_offset, bytes);
  return out->src != nullptr && out->dst != nullptr;
}

char* ChannelClient::address_of(uint32_t segment, uint64_t offset, uint64_t bytes) {
  const Lock lock(areas_mutex_);
  for (const auto& [address, area] : areas_) {
    if (area.id == segment && offset <= area.bytes && bytes <= area.bytes - offset)
      return const_cast<char*>(address) + offset;
  }
  return nullptr;
}

bool ChannelClient::defers_any(uint32_t comm) const {
  return std::any_of(deferred_.begin(), deferred_.end(),
                     [&](const Deferred& one) { return one.descriptor.comm == comm; });
}

// In their order: so they come to the daemon on all ranks, or are met.
Status ChannelClient::try_deferred(uint32_t index, const Interrupt& interrupt) {
  const Slot& slot = channel()->slots[index];
  while (slot.state.load(std::memory_order_relaxed) == kDeferred) {
    Deferred first{};
    {
      const Lock lock(submit_mutex_);
      const uint32_t comm = slot.descriptor.comm;
      const auto found = std::find_if(deferred_.begin(), deferred_.end(),
                                      [comm](const Deferred& one) { return one.descriptor.comm == comm; });
      if (found == deferred_.end()) return Status::ok();
      first = *found;
      deferred_.erase(found);
    }
    if (Status status = try_one(first, interrupt); !status) return status;
  }
  return Status::ok();
}

Status ChannelClient::try_one(const Deferred& deferred, const Interrupt& interrupt) {
  const auto index = static_cast<uint32_t>(deferred.ticket % kSlots);
  Slot* const slot = &channel()->slots[index];
  bool tried = false, met = false, complete = false;
  int64_t met_ns = 0;
  Status status =
      meet_now(deferred.descriptor, deferred.generation, deferred.src, deferred.dst, interrupt, &tried, &met, &met_ns);
  {
    const Lock lock(submit_mutex_);
    if (met) {
      slot->started_ns = met_ns;
      slot->done_ns = now_ns();
      slot->state.store(kDone, std::memory_order_relaxed);
    } else if (!status && status.code() != Code::kAborted) {
      slot->state.store(status.code() == Code::kRegrouped ? kRegrouped : kFailed, std::memory_order_relaxed);
      status = Status::ok();                                                // the end of the operation says why
    } else if (slot->state.load(std::memory_order_relaxed) == kDeferred) {  // and not regrouped meanwhile
      const bool present = deferred.generation == generation();
      slot->state.store(present ? kSubmitted : kRegrouped, std::memory_order_relaxed);
      if (present) complete = hand_over(index, tried);
      complete |= submit_deferred(deferred.descriptor.comm);
    }
    if (!complete && sheet()->status.load() == kRunning) return status;
  }
  ring();
  return status;
}

bool ChannelClient::submit_deferred(uint32_t comm) {
  bool complete = false;
  for (auto one = deferred_.begin(); one != deferred_.end();) {  // in their order
    if (one->descriptor.comm != comm) {
      ++one;
      continue;
    }
    const auto index = static_cast<uint32_t>(one->ticket % kSlots);
    const bool present = one->generation == generation();
    channel()->slots[index].state.store(present ? kSubmitted : kRegrouped);
    if (present) complete |= hand_over(index, false);
    one = deferred_.erase(one);
  }
  return complete;
}

void ChannelClient::give_up_deferring(uint32_t index) {
  if (getpid() != pid_) return;
  {
    const Lock lock(submit_mutex_);
    const Slot& slot = channel()->slots[index];
    if (slot.state.load(std::memory_order_relaxed) != kDeferred) return;
    if (!submit_deferred(slot.descriptor.comm) && sheet()->status.load() == kRunning) return;
  }
  ring();
}

void ChannelClient::submit_all_deferred(uint32_t comm) {
  {
    const Lock lock(submit_mutex_);
    if (!defers_any(comm)) return;
    if (!submit_deferred(comm) && sheet()->status.load() == kRunning) return;
  }
  ring();
}

void ChannelClient::submit_deferred_if(const std::function<bool(const Deferred&)>& chosen) {
  for (;;) {
    uint32_t comm = 0;
    {
      const Lock lock(submit_mutex_);
      const auto found = std::find_if(deferred_.begin(), deferred_.end(), chosen);
      if (found == deferred_.end()) return;
      comm = found->descriptor.comm;
    }
    submit_all_deferred(comm);
  }
}

void ChannelClient::ring() {
  JobPage* job = page();
  job->doorbell.fetch_add(1);  // both sequentially consistent: either we see it sleeping or it sees the new number
  if (job->sleeping.load() != 0 && job->sleeping.exchange(0) != 0) futex_wake(&job->doorbell);
}

Status ChannelClient::slot_of(uint64_t ticket, uint32_t* slot) {
  const Lock lock(submit_mutex_);
  *slot = static_cast<uint32_t>(ticket % kSlots);
  if (ticket == 0 || tickets_[*slot] != ticket) {
    return {Code::kInvalid, "ticket " + std::to_string(ticket) + " is unknown: each ticket is waited for once"};
  }
  return Status::ok();
}

void ChannelClient::release(uint32_t slot) {
  const Lock lock(submit_mutex_);
  free_slot(slot);
}

void ChannelClient::free_slot(uint32_t slot) {
  channel()->slots[slot].state.store(kFree, std::memory_order_relaxed);
  tickets_[slot] = 0;
  free_.push_back(slot);
}

void ChannelClient::abandon(uint64_t ticket) {
  give_up_deferring(static_cast<uint32_t>(ticket % kSlots));  // others need it all the same
  const Lock lock(submit_mutex_);
  abandoned_.push_back(ticket);
}

void ChannelClient::free_abandoned() {
  const auto over = [this](uint64_t ticket) REQUIRES(submit_mutex_) {
    const uint32_t slot = static_cast<uint32_t>(ticket % kSlots);
    if (tickets_[slot] != ticket) return true;
    if (!is_over(channel()->slots[slot].state.load(std::memory_order_acquire))) return false;
    free_slot(slot);
    return true;
  };
  abandoned_.erase(std::remove_if(abandoned_.begin(), abandoned_.end(), over), abandoned_.end());
}

Status ChannelClient::done(uint64_t ticket, bool* done) {
  uint32_t index;
  if (Status status = slot_of(ticket, &index); !status) return status;
  give_up_deferring(index);  // the caller does something else
  const uint32_t state = channel()->slots[index].state.load(std::memory_order_acquire);
  *done = is_over(state) || daemon_gone();
  return Status::ok();
}

Status ChannelClient::wait(uint64_t ticket, int64_t deadline_ns, const Interrupt& interrupt, Times* times) {
  if (getpid() != pid_) return check_usable();
  uint32_t index;
  if (Status status = slot_of(ticket, &index); !status) return status;
  if (Status status = try_deferred(index, interrupt); !status) return status;
  uint32_t state = kSubmitted;
  if (Status status = await(&channel()->slots[index], deadline_ns, interrupt, &state); !status) return status;
  return finish(index, state, times);
}

Status ChannelClient::wait_all(const std::vector<uint64_t>& tickets, int64_t deadline_ns, const Interrupt& interrupt,
                               std::vector<Times>* times) {
  if (getpid() != pid_) return check_usable();
  for (const uint64_t ticket : tickets) {
    uint32_t index;
    if (Status status = slot_of(ticket, &index); !status) return status;
    if (Status status = try_deferred(index, interrupt); !status) return status;
  }
  for (size_t i = tickets.size(); i-- > 0;) {
    uint32_t index, state = kSubmitted;
    if (Status status = slot_of(tickets[i], &index); !status) return status;
    if (Status status = await(&channel()->slots[index], deadline_ns, interrupt, &state); !status) return status;
    if (state != kDone) return Status::ok();
  }
  times->resize(tickets.size());
  for (size_t i = 0; i < tickets.size(); ++i) {
    if (Status status = wait(tickets[i], deadline_ns, interrupt, &(*times)[i]); !status) return status;
  }
  return Status::ok();
}

Status ChannelClient::await(Slot* slot, int64_t deadline_ns, const Interrupt& interrupt, uint32_t* state) {
  for (int spin = 0;; ++spin) {
    *state = slot->state.load(std::memory_order_acquire);
    if (is_over(*state)) return Status::ok();
    if (spin >= spins_) break;
    spin_pause();
  }
  const Note noted(on_main_thread() ? &channel()->main_waits : nullptr,
                   static_cast<uint32_t>(slot - channel()->slots) + 1);
  for (;;) {
    // The state says that somebody sleeps; the daemon then wakes. If it got ahead of us, the exchange fails.
    uint32_t expected = kSubmitted;
    slot->state.compare_exchange_strong(expected, kSubmittedWaiting, std::memory_order_acq_rel);
    const int64_t now = now_ns();
    const bool late = deadline_ns >= 0 && now >= deadline_ns;
    const bool woken = !late && sleep_slice(&slot->state, kSubmittedWaiting, now, deadline_ns);
    *state = slot->state.load(std::memory_order_acquire);
    if (is_over(*state)) return Status::ok();
    if (late) return {Code::kTimeout, "not done yet"};
    if (woken) continue;
    if (interrupt && interrupt()) return {Code::kAborted, "interrupted"};
    if (daemon_gone()) {
      *state = slot->state.load(std::memory_order_acquire);  // the last thing it did
      if (is_over(*state)) return Status::ok();
      *state = orphaned() ? kRegrouped : kFailed;  // nobody will ever complete it
      return Status::ok();
    }
  }
}

Status ChannelClient::finish(uint32_t slot, uint32_t state, Times* times) {
  const Slot& done = channel()->slots[slot];
  times->submitted_ns = done.submitted_ns;
  times->started_ns = done.started_ns;
  times->done_ns = done.done_ns;
  times->source = static_cast<Kind>(done.descriptor.kind) == Kind::kRecv ? done.descriptor.root : -1;
  // Read the reason first: the slot may be taken by another thread once it is released.
  std::string why = state == kDone ? "" : error();
  const bool gone = state == kFailed && daemon_gone();
  const uint32_t generation = done.generation;
  if (!gone) release(slot);  // else the daemon may be dying and still write: leave the slot alone
  if (state == kDone) return Status::ok();
  if (state == kRegrouped) {
    return {Code::kRegrouped, why.empty() ? "generation " + std::to_string(generation) + " has ended" : why};
  }
  if (why.empty()) why = gone ? "this rank has closed its channel to the node daemon" : "the operation failed";
  return {Code::kUnavailable, why};
}

}  // namespace bagua
