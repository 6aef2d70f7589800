#include "engine/executor_inbox.h"

#include <algorithm>
#include <utility>

namespace bagua {

// Under mutex_.
bool ExecutorInbox::accept() {
  if (!closed_ && first_put_ns_ < 0) first_put_ns_ = now_ns();
  return !closed_;
}

bool ExecutorInbox::put(Collective* operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!accept()) return false;
  content_.collectives.push_back(std::move(*operation));
  return true;
}

bool ExecutorInbox::put(SendOrRecv* half) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!accept()) return false;
  content_.halves.push_back(std::move(*half));
  return true;
}

bool ExecutorInbox::note_left(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int>& left = content_.left;
  if (std::find(left.begin(), left.end(), rank) != left.end()) return false;
  left.push_back(rank);
  return true;
}

void ExecutorInbox::notify() {
  {
    std::lock_guard<std::mutex> lock(mutex_);  // so that nobody is between its test and its sleep
  }
  changed_.notify_all();
}

bool ExecutorInbox::empty() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return content_.collectives.empty() && content_.halves.empty();
}

ExecutorInbox::Content ExecutorInbox::take() {
  Content taken;
  std::lock_guard<std::mutex> lock(mutex_);
  taken.collectives.swap(content_.collectives);
  taken.halves.swap(content_.halves);
  taken.left = content_.left;
  return taken;
}

ExecutorInbox::Content ExecutorInbox::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  return std::exchange(content_, {});
}

}  // namespace bagua
