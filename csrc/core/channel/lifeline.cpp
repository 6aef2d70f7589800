#include "channel/lifeline.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/clock.h"
#include "base/mutex.h"
#include "channel/futex.h"

namespace bagua {

namespace {

constexpr unsigned kExiting = 4;  // PF_EXITING of <linux/sched.h>
constexpr int kMostWakes = 1000;  // a rank that scribbles on its page costs no more of the daemon's time
constexpr int kLooks = 20;        // 1 ms apart: the thread that held the mutex may be the first to end

// Never freed: the kernel looks at the page when the process ends.
struct Page {
  pid_t owner;
  Fd file;
  std::shared_ptr<Mapping> memory;
};

bool lock_for_ever(char* data) {
  auto* const mutex = reinterpret_cast<pthread_mutex_t*>(data);
  pthread_mutexattr_t attributes;
  if (pthread_mutexattr_init(&attributes) != 0) return false;
  const bool made = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST) == 0 &&
                    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) == 0 &&
                    pthread_mutex_init(mutex, &attributes) == 0;
  pthread_mutexattr_destroy(&attributes);
  return made && pthread_mutex_trylock(mutex) == 0;  // nobody else has it, and what is never waited for is in no order
}

}  // namespace

int lifeline() {
  static Mutex mutex;
  static Page* page = nullptr;
  const Lock lock(mutex);
  if (page != nullptr && page->owner == getpid()) return page->file.get();
  auto* const fresh = new Page{getpid(), {}, nullptr};  // after a fork: the parent's stays mapped here
  if (!Mapping::create(sizeof(pthread_mutex_t), &fresh->file, &fresh->memory) ||
      !lock_for_ever(fresh->memory->data())) {
    fresh->file.reset();
  }
  page = fresh;
  return page->file.get();
}

bool dies_of_signal(pid_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  FILE* const file = fopen(path.c_str(), "re");
  if (file == nullptr) return false;
  char text[2048];
  text[fread(text, 1, sizeof text - 1, file)] = '\0';
  fclose(file);
  const char* const name_end = strrchr(text, ')');  // the name may hold blanks and brackets
  unsigned flags = 0;
  if (name_end == nullptr || sscanf(name_end + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1) return false;
  const char* const last = strrchr(text, ' ');  // field 52: the status that waitpid() will tell
  const int signal = static_cast<int>(strtol(last, nullptr, 10)) & 0x7f;
  const bool stops = signal == SIGSTOP || signal == SIGTSTP || signal == SIGTTIN || signal == SIGTTOU;
  return (flags & kExiting) != 0 && signal != 0 && !stops;
}

std::unique_ptr<DeathWatch> DeathWatch::create(const Fd& page, pid_t pid) {
  std::shared_ptr<Mapping> memory;
  if (pid <= 0 || !Mapping::adopt(page.get(), &memory) || memory->bytes() < sizeof(pthread_mutex_t)) return nullptr;
  std::unique_ptr<DeathWatch> watch(new DeathWatch(std::move(memory), pid));
  if (!watch->died_.open()) return nullptr;
  watch->thread_ = std::thread([self = watch.get()] { self->run(); });
  return watch;
}

DeathWatch::~DeathWatch() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  while (!over_.load()) {  // it may have been about to sleep
    futex_wake(word());
    usleep(100);
  }
  thread_.join();
}

// The C library keeps the owner in the mutex's first word, in the form that the kernel wants.
std::atomic<uint32_t>* DeathWatch::word() const {
  return reinterpret_cast<std::atomic<uint32_t>*>(page_->data());
}

void DeathWatch::run() {
  for (int wakes = 0; wakes < kMostWakes && !stopping_.load(); ++wakes) {
    uint32_t owner = word()->load();
    if ((owner & FUTEX_OWNER_DIED) != 0) {
      futex_wake(word());  // the kernel wakes one; the process may be a rank of several engines
      for (int look = 0; look < kLooks && !stopping_.load(); ++look) {
        if (dies_of_signal(pid_)) {
          died_.signal();
          break;
        }
        usleep(1000);
      }
      break;
    }
    if ((owner & FUTEX_TID_MASK) == 0) break;  // nobody holds it
    if ((owner & FUTEX_WAITERS) != 0 || word()->compare_exchange_strong(owner, owner | FUTEX_WAITERS)) {
      futex_wait(word(), owner | FUTEX_WAITERS, -1);
    }
  }
  over_.store(true);
}

}  // namespace bagua
