// The rank's end of the channel: joins the daemon, gets memory, submits operations and waits for them, and enters one
// generation after the other.
//
// Thread safety: all methods may be called from any thread. Lock order: request_mutex_, then
// sheet_mutex_, then the mutex of a meeting, then submit_mutex_, then areas_mutex_;
// none but the first two is held while waiting for an operation.
//
// client.cpp: the channel, memory and communicators; client_generation.cpp: generations, how they end, and daemons that
// come back; client_operations.cpp: operations.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/status.h"
#include "channel/futex.h"
#include "channel/layout.h"
#include "channel/meeting.h"
#include "channel/memory.h"
#include "channel/protocol.h"

namespace bagua {

// A generation as a rank sees it.
struct GenerationView {
  uint64_t generation = 0;
  int rank = -1;
  std::vector<std::vector<int>> hosts;  // ranks of every host
  std::vector<int> members;             // by rank
  bool elastic = false;                 // it may end before the job does
  bool newcomer = false;                // it is a lobby, of processes that are in no generation of the job yet
};

class ChannelClient {
 public:
  struct Times {
    int64_t submitted_ns = 0, started_ns = 0, done_ns = 0;
    int source = -1;  // of a receive: index of the sender
  };
  struct Allocation {
    uint64_t id = 0;
    std::shared_ptr<Mapping> memory;
  };
  // Called every few ms of a long wait, and after a signal; true ends the wait with kAborted.
  using Interrupt = std::function<bool()>;

  static Status connect(const std::string& socket, const uint8_t* token, int member, int64_t timeout_ns,
                        std::unique_ptr<ChannelClient>* out);
  ~ChannelClient();  // without close() the daemon takes the rank for lost
  ChannelClient(const ChannelClient&) = delete;
  ChannelClient& operator=(const ChannelClient&) = delete;

  // Announces how much memory this rank is going to ask for; kResource with the figures where that can't be had.
  Status require(uint64_t bytes);
  // `for_peers`: other ranks of this host may borrow it.
  Status alloc(uint64_t bytes, Allocation* out, bool for_peers = false);
  // Maps memory that another member on this host has made for peers. It stays mapped here when its owner frees it.
  Status borrow(uint32_t owner, uint64_t id, Allocation* out);
  Status free_segment(uint64_t id);
  // Keeps the mapping until free_segment(), for a caller that holds no shared_ptr.
  void keep(Allocation allocation);
  Status create_comm(uint32_t comm, const std::vector<int>& ranks, int64_t timeout_ns);
  Status destroy_comm(uint32_t comm);

  // Waits until there is a generation after the one that this rank is in, and enters it: its communicators are gone
  // but the world, memory and tickets stay. kTimeout: not by the deadline (< 0: none). kDismissed: the job goes on
  // without this rank, as was planned. kUnavailable: the job is over, or has lost this rank, in words. kAborted:
  // interrupted.
  Status enter(int64_t deadline_ns, const Interrupt& interrupt);
  // The newest generation that is planned; 0: there was none.
  uint64_t planned() const { return page()->planned.load(std::memory_order_relaxed); }
  // JobPage::trace.
  uint64_t trace() const { return page()->trace.load(std::memory_order_relaxed); }
  GenerationView view();
  uint64_t generation() const { return generation_.load(std::memory_order_relaxed); }

  // How an operation is submitted.
  struct Submission {
    uint64_t generation = 0;  // to which it belongs; 0: the present one
    bool counted = false;     // meet() has counted it among the collectives of its communicator
    // The daemon is not woken; true is written if ring() is to be called, as soon as what follows at once has been
    // submitted.
    bool* ring = nullptr;
    // The caller waits for it next, with nothing in between: where the ranks can do it by themselves, they try it then.
    // kBehind: if another one is deferred on its communicator.
    enum class Defer { kNever, kIfPossible, kBehind } defer = Defer::kNever;
  };
  // Takes everything but the times; fails at once if the engine has failed or kSlots operations are in flight.
  // kRegrouped: its generation has ended, enter() the next one.
  Status submit(const Descriptor& descriptor, uint64_t* ticket, const Submission& how) {
    return submit({&descriptor}, ticket, how);
  }
  Status submit(const Descriptor& descriptor, uint64_t* ticket) { return submit(descriptor, ticket, Submission()); }
  // Several at once, one behind the other, or none; the daemon is woken once. `tickets`: as many.
  Status submit(std::initializer_list<const Descriptor*> descriptors, uint64_t* tickets, const Submission& how);
  void ring();
  // Tries a small collective without the daemon, see meeting.h. *met: the result is there. Otherwise, and after
  // kAborted, submit it, as `counted` if *tried is true. One at a time for each communicator: others wait until the
  // ranks have met. `generation`: to which it belongs.
  Status meet(const Descriptor& descriptor, uint64_t generation, const char* src, char* dst, const Interrupt& interrupt,
              bool* tried, bool* met) {
    if (getpid() != pid_) return check_usable();  // another thread of the parent may have held the lock
    submit_all_deferred(descriptor.comm);         // they come first
    int64_t met_ns = 0;
    return meet_now(descriptor, generation, src, dst, interrupt, tried, met, &met_ns);
  }
  // All members of the communicator are ranks of this host; false if it is unknown.
  bool on_one_host(uint32_t comm);
  // Shared memory that holds [data, data + bytes); false: it is ordinary memory.
  bool locate(const void* data, size_t bytes, uint32_t* segment, uint64_t* offset);
  // kTimeout: not done by the deadline, it goes on. Any other outcome frees the ticket, but kAborted (interrupted) and
  // kInvalid (no such ticket). kRegrouped: its generation ended before it was done.
  Status wait(uint64_t ticket, int64_t deadline_ns, const Interrupt& interrupt, Times* times);
  // Waits for several, and sleeps once if the last of them is over last. `times` gets those of all, or none if one is
  // not over well. Then, and after kTimeout, kAborted and kInvalid, each is still to be waited for.
  Status wait_all(const std::vector<uint64_t>& tickets, int64_t deadline_ns, const Interrupt& interrupt,
                  std::vector<Times>* times);
  Status done(uint64_t ticket, bool* done);
  // Nobody will wait for this operation: its slot is free once it is over.
  void abandon(uint64_t ticket);

  // The engine's first error, why the generation is suspended, or that the daemon is gone; empty while all is well.
  std::string error() const;
  // Sleeps until error() is not empty: kUnavailable or kRegrouped with it. kTimeout: not by the deadline (< 0: none).
  // May return for no reason, and does after nudge().
  Status wait_failure(int64_t deadline_ns);
  void nudge();
  const Counters* counters() const { return &page()->counters; }
  // The page of the present generation; always at the same address.
  GenerationPage* sheet() const { return reinterpret_cast<GenerationPage*>(sheet_memory_->data()); }
  // Says goodbye and closes the socket. Idempotent. In a forked child it only closes. `words`, for people: the
  // exception that the program is handling, if any. The first kMaxWords bytes are told.
  void close(const std::string& words = "");
  // The same of a rank that ends in the middle of the job: `text`, for people: why. `lost`: through no fault of the
  // program.
  void fail(const std::string& text, bool lost);
  // This rank has begun so many backward passes.
  void note_passes(uint64_t passes) { channel()->passes.store(passes, std::memory_order_relaxed); }

 private:
  // This rank's view of a communicator.
  struct Group {
    bool one_host = false;  // all its members are here
    bool counted = false;   // it has arrival counters
    size_t local_members = 0;
    uint32_t own = 0;                  // position of this rank among the host's
    std::vector<uint32_t> others;      // and of the other local members
    uint64_t submitted = 0;            // collectives of this rank so far
    uint64_t last_ticket = 0;          // of the last collective that went to the daemon
    std::shared_ptr<Meeting> meeting;  // nullptr: its members don't meet
  };
  // An operation that its rank tries without the daemon when it waits.
  struct Deferred {
    uint64_t ticket, generation;
    int64_t since_ns;
    Descriptor descriptor;
    const char* src;
    char* dst;
  };
  struct Area {
    uint64_t bytes, id;
    Fd file;                             // in elastic jobs
    std::shared_ptr<Mapping> kept = {};  // by keep()
  };
  static constexpr int64_t kSliceNs = 100'000'000;  // how often a waiter looks for signals and for the daemon's death

  // Sleeps while *word == expected, until the deadline (< 0: none) but for one slice at most. True: woken.
  static bool sleep_slice(std::atomic<uint32_t>* word, uint32_t expected, int64_t now, int64_t deadline_ns) {
    return futex_wait(word, expected, deadline_ns >= 0 ? std::min(now + kSliceNs, deadline_ns) : now + kSliceNs);
  }

  ChannelClient(std::string path, const uint8_t* token, int member, int64_t timeout_ns);

  Status join();
  // Joins the daemon that was started in the place of the one that has gone, with this rank's memory; what was
  // submitted ends as regrouped. *page: of a generation, or none if another thread was first. kTimeout: it is not
  // there.
  Status come_back(Fd* page);
  Status offer_memory(int socket);
  Status take_channel(int job_page, int channel);
  // Waits until come_back() has done it, and enters the generation that is there if it is a newer one.
  Status rejoin(int64_t deadline_ns, const Interrupt& interrupt);
  // `ask` for what has nothing to do with generations: asks the next daemon if this one has gone.
  Status ask_anyone(const Request& request, Reply* reply = nullptr, std::vector<Fd>* descriptors = nullptr);
  // Takes the page of a generation, and forgets the one before.
  Status begin(int page);
  Status await_change(uint32_t seen, int64_t deadline_ns, const Interrupt& interrupt);
  Status ask(const Request& request, Reply* reply = nullptr, std::vector<Fd>* descriptors = nullptr) {
    return ask(request, {}, timeout_ns_, reply, descriptors);
  }
  Status ask(const Request& request, const std::vector<int>& members, int64_t timeout_ns, Reply* reply = nullptr,
             std::vector<Fd>* descriptors = nullptr);
  // The last request.
  void part(Request request, const std::string& words);
  // `room`: see Communicator::room.
  void note_members(uint32_t comm, const std::vector<int>& ranks, uint32_t room) REQUIRES(submit_mutex_);
  std::shared_ptr<Meeting> meeting_of(uint32_t comm);
  // The last collective of this communicator that went to the daemon is not over, so the next one goes there too, and
  // comes behind it: inside a host the daemon does them one after the other. Ranks that see the end at different times
  // all go there: see Meeting::stay_away().
  bool daemon_works_for(uint32_t comm) REQUIRES(submit_mutex_);
  // meet() before those that are deferred. *met_ns: when the ranks had met.
  Status meet_now(const Descriptor& descriptor, uint64_t generation, const char* src, char* dst,
                  const Interrupt& interrupt, bool* tried, bool* met, int64_t* met_ns);
  // A free slot for it, in this state.
  uint32_t fill_slot(const Descriptor& descriptor, SlotState state, uint64_t* ticket) REQUIRES(submit_mutex_);
  // Puts one into the ring; true if the daemon must be woken for it.
  bool hand_over(uint32_t slot, bool counted) REQUIRES(submit_mutex_);
  // *out: where it reads and writes, if it may be deferred.
  bool may_defer(const Descriptor& descriptor, Deferred* out) REQUIRES(submit_mutex_);
  char* address_of(uint32_t segment, uint64_t offset, uint64_t bytes);
  bool defers_any(uint32_t comm) const REQUIRES(submit_mutex_);
  // Defers all of them, or none (false).
  bool defer(std::initializer_list<const Descriptor*> descriptors, uint64_t* tickets, const Submission& how)
      REQUIRES(submit_mutex_);
  // Tries the deferred operations of this slot's communicator in their order, up to the one in the slot. After one for
  // which the ranks did not meet, all others are submitted. kAborted: interrupted.
  Status try_deferred(uint32_t slot, const Interrupt& interrupt);
  Status try_one(const Deferred& deferred, const Interrupt& interrupt);
  // Submits those that are deferred on a communicator; true if the daemon must be woken for them.
  bool submit_deferred(uint32_t comm) REQUIRES(submit_mutex_);
  // The same, and wakes it.
  void submit_all_deferred(uint32_t comm);
  // Submits those for which this is true, and all others on their communicators.
  void submit_deferred_if(const std::function<bool(const Deferred&)>& chosen);
  // Submits all that are deferred on the communicator of the operation in this slot, if that one is.
  void give_up_deferring(uint32_t slot);
  // Counts one submission of a collective; true if the daemon must be woken for it.
  bool completes(uint32_t comm, Group* group) REQUIRES(submit_mutex_);
  Status check_usable() const;
  Status slot_of(uint64_t ticket, uint32_t* slot);
  Status finish(uint32_t slot, uint32_t state, Times* times);
  void release(uint32_t slot);
  void free_slot(uint32_t slot) REQUIRES(submit_mutex_);
  // Frees slots of abandoned operations that are over.
  void free_abandoned() REQUIRES(submit_mutex_);
  Status await(Slot* slot, int64_t deadline_ns, const Interrupt& interrupt, uint32_t* state);
  bool daemon_gone() const;
  // It has gone, and another one is to follow.
  bool orphaned() const { return elastic_.load(std::memory_order_relaxed) && socket_fd_.load() >= 0 && daemon_gone(); }
  Status daemon_lost() const;
  Status left_behind() const;
  // Stops this process when the lease of its host is over and nobody else has, see JobPage::fence.
  void watch_fence();
  JobPage* page() const { return reinterpret_cast<JobPage*>(page_memory_->data()); }
  RankChannel* channel() const { return reinterpret_cast<RankChannel*>(channel_memory_->data()); }

  // constant after connect()
  const int member_;
  const pid_t pid_;
  const int64_t timeout_ns_;
  const std::string path_;
  std::array<uint8_t, kTokenBytes> token_{};
  int spins_ = 0;
  MeetingWaits meeting_waits_;
  std::shared_ptr<Mapping> page_memory_, sheet_memory_, channel_memory_;

  Mutex request_mutex_;  // one request at a time; guards the use of socket_ but for poll()
  Fd socket_;
  std::atomic<uint64_t> required_{0};  // bytes that were announced
  std::atomic<int> socket_fd_{-1};     // for polling without the lock; -1 once closed

  Mutex submit_mutex_;
  std::atomic<bool> elastic_{false};
  std::atomic<uint64_t> generation_{0};  // changes with both sheet_mutex_ and submit_mutex_
  GenerationView view_ GUARDED_BY(submit_mutex_);
  std::vector<int> local_ranks_ GUARDED_BY(submit_mutex_);  // empty if there are too many for arrival counters
  std::vector<uint32_t> free_ GUARDED_BY(submit_mutex_);
  std::vector<uint64_t> tickets_ GUARDED_BY(submit_mutex_);  // of every slot; 0: none
  uint64_t next_ticket_ GUARDED_BY(submit_mutex_) = 1;
  std::vector<uint64_t> abandoned_ GUARDED_BY(submit_mutex_);  // tickets
  std::map<uint32_t, Group> groups_ GUARDED_BY(submit_mutex_);
  std::vector<Deferred> deferred_ GUARDED_BY(submit_mutex_);

  // Read while ranks meet. Written, with submit_mutex_ too, when a page takes the place of another.
  SharedMutex sheet_mutex_;

  std::thread* fence_watch_ = nullptr;  // not freed in a forked child, which has no such thread
  std::atomic<uint32_t> closing_{0};    // its futex word

  Mutex areas_mutex_;
  std::map<const char*, Area> areas_ GUARDED_BY(areas_mutex_);  // segments of this rank, by address
};

}  // namespace bagua
