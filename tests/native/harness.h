// A small test harness: TEST(name) { ... } registers; CHECK stops the test, EXPECT goes on. Both may be used on any
// thread, but only the test's own thread and those started with Threads stop at a CHECK.
#pragma once

#include <exception>
#include <functional>
#include <list>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"

namespace bagua::test {

struct Failed : std::exception {
  const char* what() const noexcept override { return "a CHECK failed"; }
};

// Registers a test under the stem of its file; returns a dummy.
int add_test(const char* file, const char* name, void (*body)());
// Notes a failure of the running test. Thread-safe.
void note_failure(const char* file, int line, const std::string& text);
// Whether `status` is an error that says `text`; notes what it says if not.
bool has(const Status& status, const std::string& text);
// Ends the running test as skipped, with the reason on the screen.
[[noreturn]] void skip(const std::string& reason);

template <class T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else {
    out << value;
  }
  return out.str();
}

inline bool check_ok(const Status& status, const char* file, int line, const char* text) {
  if (!status) note_failure(file, line, std::string(text) + ": " + status.message());
  return static_cast<bool>(status);
}

template <class A, class B>
bool check_equal(const A& a, const B& b, const char* file, int line, const char* text) {
  if (a == b) return true;
  note_failure(file, line, std::string(text) + ": " + show(a) + " is not " + show(b));
  return false;
}

// Threads that are joined at the end of the scope or by join(), where a CHECK that failed in one of them fails the
// test.
class Threads {
 public:
  template <class F>
  void start(F body) {
    threads_.emplace_back([body = std::move(body)]() mutable {
      try {
        body();
      } catch (const Failed&) {
        // Noted already.
      }
    });
  }
  void join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  ~Threads() { join(); }

 private:
  std::list<std::thread> threads_;  // a vector's growth makes gcc 12 warn of bounds that are kept
};

// While it lives, this process gets no new file descriptor.
class NoDescriptors {
 public:
  NoDescriptors();
  ~NoDescriptors();
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  const unsigned long before_;  // the soft limit
  std::vector<int> held_;
};

// The share of one processor that this process uses for a while.
double busy_share();

}  // namespace bagua::test

#define TEST(name)                                                                                           \
  static void test_##name();                                                                                 \
  [[maybe_unused]] static const int registered_##name = bagua::test::add_test(__FILE__, #name, test_##name); \
  static void test_##name()

#define BAGUA_TEST_EXPECT(condition, stop)                       \
  do {                                                           \
    if (!(condition)) {                                          \
      bagua::test::note_failure(__FILE__, __LINE__, #condition); \
      if (stop) throw bagua::test::Failed();                     \
    }                                                            \
  } while (false)
#define EXPECT(condition) BAGUA_TEST_EXPECT(condition, false)
#define CHECK(condition) BAGUA_TEST_EXPECT(condition, true)
#define EXPECT_EQ(a, b) bagua::test::check_equal((a), (b), __FILE__, __LINE__, #a " == " #b)
#define CHECK_EQ(a, b)                                 \
  do {                                                 \
    if (!EXPECT_EQ(a, b)) throw bagua::test::Failed(); \
  } while (false)
#define EXPECT_OK(status) bagua::test::check_ok((status), __FILE__, __LINE__, #status)
#define CHECK_OK(status)                                 \
  do {                                                   \
    if (!EXPECT_OK(status)) throw bagua::test::Failed(); \
  } while (false)
