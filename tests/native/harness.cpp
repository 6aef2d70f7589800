#include "harness.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <iterator>
#include <mutex>

namespace bagua::test {
namespace {

constexpr unsigned kSecondsPerTest = 150;  // a hang, not a slow machine: under TSan beside other load 60 were used up

struct Test {
  std::string suite;
  std::string name;
  void (*body)();
};

struct Skipped {
  std::string reason;
};

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

std::mutex failures_mutex;
int failures = 0;        // of the running test; protected by failures_mutex
char running[256] = "";  // for the alarm

void on_alarm(int) {
  // Only what is allowed in a signal handler.
  const char text[] = " took too long\n";
  if (::write(2, running, std::strlen(running)) < 0 || ::write(2, text, sizeof text - 1) < 0) ::_exit(3);
  ::abort();
}

rlimit file_limit() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return limit;
}

// 0: passed, 1: failed, 2: skipped.
int run(const Test& test) {
  std::snprintf(running, sizeof running, "%s.%s", test.suite.c_str(), test.name.c_str());
  failures = 0;
  const auto start = std::chrono::steady_clock::now();
  std::string skipped;
  ::alarm(kSecondsPerTest);
  try {
    test.body();
  } catch (const Failed&) {
    // Noted already.
  } catch (const Skipped& reason) {
    skipped = reason.reason.empty() ? "no reason given" : reason.reason;
  } catch (const std::exception& error) {
    note_failure(test.suite.c_str(), 0, std::string("exception: ") + error.what());
  }
  ::alarm(0);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const int result = failures > 0 ? 1 : skipped.empty() ? 0 : 2;
  const char* words[] = {"ok     ", "FAILED ", "skipped"};
  std::printf("%s %s (%.2f s) %s\n", words[result], running, seconds, skipped.c_str());
  std::fflush(stdout);
  return result;
}

// Returns when other threads have closed what they were about to close.
void await_quiet_descriptors() {
  const auto number = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  auto before = number();
  for (int unchanged = 0; unchanged < 10;) {
    ::usleep(20'000);
    const auto now = number();
    unchanged = now == before ? unchanged + 1 : 0;
    before = now;
  }
}

}  // namespace

int add_test(const char* file, const char* name, void (*body)()) {
  std::string suite = file;
  suite = suite.substr(suite.rfind('/') + 1);
  suite = suite.substr(0, suite.rfind('.'));
  tests().push_back({suite, name, body});
  return 0;
}

void note_failure(const char* file, int line, const std::string& text) {
  std::lock_guard<std::mutex> lock(failures_mutex);
  if (++failures <= 20) std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
}

bool has(const Status& status, const std::string& text) {
  if (!status && status.message().find(text) != std::string::npos) return true;
  note_failure(__FILE__, __LINE__, "'" + status.message() + "' lacks '" + text + "'");
  return false;
}

NoDescriptors::NoDescriptors() : before_(file_limit().rlim_cur) {
  await_quiet_descriptors();
  const int first_free = ::dup(2);
  ::close(first_free);
  rlimit limit = file_limit();
  limit.rlim_cur = static_cast<rlim_t>(first_free);
  CHECK(first_free > 0 && ::setrlimit(RLIMIT_NOFILE, &limit) == 0);
  // Other threads may have closed some meanwhile.
  for (int fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC); fd >= 0; fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) {
    held_.push_back(fd);
  }
}

NoDescriptors::~NoDescriptors() {
  rlimit limit = file_limit();
  limit.rlim_cur = before_;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  for (const int fd : held_) ::close(fd);
}

double busy_share() {
  const auto wall = std::chrono::steady_clock::now();
  const std::clock_t used = std::clock();
  ::usleep(500'000);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - wall).count();
  return static_cast<double>(std::clock() - used) / CLOCKS_PER_SEC / seconds;
}

void skip(const std::string& reason) {
  throw Skipped{reason};
}

}  // namespace bagua::test

// Arguments: suites, or suite.test; none: everything.
int main(int argc, char** argv) {
  using namespace bagua::test;
  ::signal(SIGALRM, on_alarm);
  int count = 0;
  int failed = 0;
  for (const auto& test : tests()) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) {
      wanted = wanted || test.suite == argv[i] || test.suite + "." + test.name == argv[i];
    }
    if (wanted) {
      ++count;
      failed += run(test) == 1;
    }
  }
  std::printf("%d tests, %d failed\n", count, failed);
  return failed == 0 && count > 0 ? 0 : 1;
}
