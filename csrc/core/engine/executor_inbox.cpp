#include "engine/executor_inbox.h"

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

bool ExecutorInbox::put(SendOrRecv* half) {
  const Lock lock(mutex_);
  if (!accept()) return false;
  content_.halves.push_back(std::move(*half));
  return true;
}

void ExecutorInbox::seek(const Communicator::Target& target) {
  const Lock lock(mutex_);
  if (accept()) content_.seeks.push_back(target);
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
  return content_.collectives.empty() && content_.halves.empty();
}

ExecutorInbox::Content ExecutorInbox::take() {
  Content taken;
  const Lock lock(mutex_);
  taken.collectives.swap(content_.collectives);
  taken.halves.swap(content_.halves);
  taken.seeks.swap(content_.seeks);
  taken.left = content_.left;
  return taken;
}

ExecutorInbox::Content ExecutorInbox::close() {
  const Lock lock(mutex_);
  closed_ = true;
  return std::exchange(content_, {});
}

}  // namespace bagua
