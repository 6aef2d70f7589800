#include "engine/remote/executor_inbox.h"

#include <algorithm>
#include <utility>

namespace bagua {

bool ExecutorInbox::accept() {
  if (!closed_ && first_put_ns_ < 0) first_put_ns_ = now_ns();
  return !closed_;
}

bool ExecutorInbox::put(Collective* operation) {
  const Lock lock(mutex_);
  if (!accept()) return false;
  content_.collectives.push_back(std::move(*operation));
  return true;
}

bool ExecutorInbox::put(Communicator::Between* one) {
  const Lock lock(mutex_);
  if (!accept()) return false;
  content_.between.push_back(std::move(*one));
  return true;
}

bool ExecutorInbox::note_left(int rank) {
  const Lock lock(mutex_);
  std::vector<int>& left = content_.left;
  if (std::find(left.begin(), left.end(), rank) != left.end()) return false;
  left.push_back(rank);
  return true;
}

void ExecutorInbox::notify() {
  {
    const Lock lock(mutex_);  // so that nobody is between its test and its sleep
  }
  changed_.notify_all();
}

bool ExecutorInbox::empty() const {
  const Lock lock(mutex_);
  return content_.collectives.empty() && content_.between.empty();
}

ExecutorInbox::Content ExecutorInbox::take() {
  Content taken;
  const Lock lock(mutex_);
  taken.collectives.swap(content_.collectives);
  taken.between.swap(content_.between);
  taken.left = content_.left;
  return taken;
}

ExecutorInbox::Content ExecutorInbox::close() {
  const Lock lock(mutex_);
  closed_ = true;
  return std::exchange(content_, {});
}

}  // namespace bagua
