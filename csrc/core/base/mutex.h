// Mutexes and locks of the standard library with Clang's thread-safety attributes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "base/thread_annotations.h"

namespace bagua {

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  friend class Lock;
  std::mutex mutex_;
};

// RAII: the mutex is locked while in scope, except between unlock() and lock().
class SCOPED_CAPABILITY Lock {
 public:
  explicit Lock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  // Takes over a mutex that the caller has locked by try_lock().
  Lock(Mutex& mutex, std::adopt_lock_t) REQUIRES(mutex) : lock_(mutex.mutex_, std::adopt_lock) {}
  ~Lock() RELEASE() {}
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock() ACQUIRE() { lock_.lock(); }
  void unlock() RELEASE() { lock_.unlock(); }

 private:
  friend class Condition;
  std::unique_lock<std::mutex> lock_;
};

// A condition variable. The mutex of `lock` is locked while a predicate runs and when a wait returns. A predicate must
// be annotated: `[this]() REQUIRES(mutex_) { ... }`.
class Condition {
 public:
  void notify_one() { changed_.notify_one(); }
  void notify_all() { changed_.notify_all(); }

  void wait(Lock& lock) { changed_.wait(lock.lock_); }
  template <class Rep, class Period>
  std::cv_status wait_for(Lock& lock, const std::chrono::duration<Rep, Period>& longest) {
    return changed_.wait_for(lock.lock_, longest);
  }

  // Clang can't see that the predicate's mutex is the mutex of `lock`.
  template <class Predicate>
  void wait(Lock& lock, Predicate predicate) NO_THREAD_SAFETY_ANALYSIS {
    changed_.wait(lock.lock_, std::move(predicate));
  }
  template <class Rep, class Period, class Predicate>
  bool wait_for(Lock& lock, const std::chrono::duration<Rep, Period>& longest,
                Predicate predicate) NO_THREAD_SAFETY_ANALYSIS {
    return changed_.wait_for(lock.lock_, longest, std::move(predicate));
  }

 private:
  std::condition_variable changed_;
};

// A mutex that one thread locks to write, or several threads lock to read.
class CAPABILITY("mutex") SharedMutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  void lock_shared() ACQUIRE_SHARED() { mutex_.lock_shared(); }
  void unlock_shared() RELEASE_GENERIC() { mutex_.unlock_shared(); }

 private:
  std::shared_mutex mutex_;
};

// RAII: locked to write while in scope, or until unlock().
class SCOPED_CAPABILITY WriterLock {
 public:
  explicit WriterLock(SharedMutex& mutex) ACQUIRE(mutex) : lock_(mutex) {}
  ~WriterLock() RELEASE() {}
  WriterLock(const WriterLock&) = delete;
  WriterLock& operator=(const WriterLock&) = delete;

  void unlock() RELEASE() { lock_.unlock(); }

 private:
  std::unique_lock<SharedMutex> lock_;
};

// RAII: locked to read while in scope.
class SCOPED_CAPABILITY ReaderLock {
 public:
  explicit ReaderLock(SharedMutex& mutex) ACQUIRE_SHARED(mutex) : lock_(mutex) {}
  ~ReaderLock() RELEASE_GENERIC() {}
  ReaderLock(const ReaderLock&) = delete;
  ReaderLock& operator=(const ReaderLock&) = delete;

 private:
  std::shared_lock<SharedMutex> lock_;
};

}  // namespace bagua
