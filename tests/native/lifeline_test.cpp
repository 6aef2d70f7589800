// Deaths that are told before the process has gone.
#include "channel/lifeline.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <vector>

#include "channel/protocol.h"
#include "harness.h"

namespace bagua {
namespace {

constexpr int kLongMs = 60'000, kShortMs = 100;

// A process that has a lifeline, and lives until it is told to end.
class Process {
 public:
  template <class F>
  explicit Process(F begin) {
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    ours_ = Fd(ends[0]);
    Fd theirs(ends[1]);
    pid_ = fork();
    if (pid_ == 0) {
      ours_.reset();
      const int line = begin();
      char word = 0;
      static_cast<void>(send_packet(theirs.get(), "", 1, &line, 1));
      static_cast<void>(!read(theirs.get(), &word, 1));
      _exit(word);
    }
    theirs.reset();
    std::vector<Fd> passed;
    size_t bytes = 0;
    char word;
    pollfd watched{ours_.get(), POLLIN, 0};
    CHECK_EQ(poll(&watched, 1, kLongMs), 1);
    CHECK_OK(receive_packet(ours_.get(), &word, 1, &bytes, &passed));
    CHECK_EQ(passed.size(), size_t{1});
    watch_ = DeathWatch::create(passed.front(), pid_);
    CHECK(watch_ != nullptr);
  }
  ~Process() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }
  bool told(int ms) const {
    pollfd watched{watch_->fd(), POLLIN, 0};
    return poll(&watched, 1, ms) == 1;
  }
  // Until it has, but its parent has not heard of it.
  void await(int what) const {
    siginfo_t info{};
    CHECK_EQ(waitid(P_PID, static_cast<id_t>(pid_), &info, what | WNOWAIT), 0);
  }
  void exit(char code) const { CHECK_EQ(write(ours_.get(), &code, 1), ssize_t{1}); }

 private:
  Fd ours_;
  pid_t pid_;
  std::unique_ptr<DeathWatch> watch_;
};

}  // namespace

TEST(a_death_by_a_signal_is_told) {
  for (const int signal : {SIGKILL, SIGTERM}) {
    const Process process(lifeline);
    CHECK(!dies_of_signal(process.pid()));
    kill(process.pid(), signal);
    CHECK(process.told(kLongMs));
    CHECK(dies_of_signal(process.pid()));
    process.await(WEXITED);
    CHECK(dies_of_signal(process.pid()));
  }
}

TEST(an_end_with_an_exit_code_is_left_to_the_parent) {
  for (const char code : {0, 9}) {
    const Process process(lifeline);
    process.exit(code);
    process.await(WEXITED);
    EXPECT(!dies_of_signal(process.pid()));
    EXPECT(!process.told(kShortMs));
  }
}

TEST(a_stopped_process_does_not_die) {
  const Process process(lifeline);
  kill(process.pid(), SIGSTOP);
  process.await(WSTOPPED);
  EXPECT(!dies_of_signal(process.pid()));
  EXPECT(!process.told(0));
}

TEST(no_process_dies_of_nothing) {
  EXPECT(!dies_of_signal(getpid()));
  EXPECT(!dies_of_signal(0));
  EXPECT(DeathWatch::create(Fd(), getpid()) == nullptr);
}

#ifndef __SANITIZE_THREAD__  // knows no threads after a fork
TEST(the_end_of_a_thread_is_no_death) {
  const Process process([] {
    int line = -1;
    std::thread([&] { line = lifeline(); }).join();
    return line;
  });
  EXPECT(!process.told(kShortMs));
  EXPECT(!dies_of_signal(process.pid()));
}
#endif

}  // namespace bagua
