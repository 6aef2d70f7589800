// Children: environment, descriptors, signals, errors, and that they die with their parent.
#include "base/spawn.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/fd.h"
#include "harness.h"

namespace bagua {
namespace {

struct Pipe {
  Fd read;
  Fd write;
  Pipe() {
    int ends[2];
    CHECK(::pipe2(ends, O_CLOEXEC) == 0);
    read = Fd(ends[0]);
    write = Fd(ends[1]);
  }
  // Everything until the last writer closes.
  std::string drain() {
    write.reset();
    std::string text;
    char buffer[4096];
    for (ssize_t got; (got = ::read(read.get(), buffer, sizeof buffer)) != 0;) {
      if (got > 0) {
        text.append(buffer, static_cast<size_t>(got));
      } else if (errno != EINTR) {
        break;
      }
    }
    return text;
  }
};

SpawnRequest shell(const std::string& script) {
  SpawnRequest request;
  request.argv = {"sh", "-c", script};
  request.env = {"PATH=/usr/bin:/bin", "GREETING=hello"};
  request.cwd = "/";
  return request;
}

int exit_status(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

// A child that has ended, or why there was none.
struct Child {
  Status status;
  pid_t pid = -1;
  int error = 0, exit = -1;
  std::string output;

  explicit Child(SpawnRequest request) {
    Pipe pipe;
    request.stdout_fd = request.stderr_fd = pipe.write.get();
    status = spawn(request, &pid, &error);
    if (!status) return;
    output = pipe.drain();
    exit = exit_status(pid);
  }
  explicit Child(const std::string& script) : Child(shell(script)) { CHECK_OK(status); }
};

TEST(environment_folder_output) {
  const Child child("pwd; echo $GREETING; echo problem >&2; cat; env | grep -c = ; exit 7");
  EXPECT_EQ(child.output.substr(0, 16), "/\nhello\nproblem\n");
  EXPECT(WIFEXITED(child.exit));
  EXPECT_EQ(WEXITSTATUS(child.exit), 7);
}

TEST(no_descriptor_is_inherited) {
  const Fd leak(::open("/dev/null", O_RDONLY));  // not close-on-exec
  const Child child("for fd in /proc/self/fd/*; do readlink $fd || true; done; ls /proc/$$/fd | tr '\\n' ' '");
  EXPECT(child.output.find("0 1 2 ") != std::string::npos);
  EXPECT_EQ(child.exit, 0);
}

TEST(own_session_and_process_group) {
  const Child child("cut -d' ' -f5,6 /proc/$$/stat; echo $$; kill -TERM $$");
  const std::string id = std::to_string(child.pid);
  EXPECT_EQ(child.output, id + " " + id + "\n" + id + "\n");
  EXPECT(WIFSIGNALED(child.exit));
  EXPECT_EQ(WTERMSIG(child.exit), SIGTERM);
}

TEST(default_signals) {
  ::signal(SIGPIPE, SIG_IGN);  // as Python does
  sigset_t blocked, before;
  ::sigemptyset(&blocked);
  ::sigaddset(&blocked, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &blocked, &before);
  SpawnRequest request = shell("");
  // No shell between: it blocks signals for moments of its own.
  request.argv = {"grep", "-E", "Sig(Blk|Ign|Cgt)", "/proc/self/status"};
  const Child child(request);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::signal(SIGPIPE, SIG_DFL);
  CHECK_OK(child.status);
  EXPECT(child.output.find("SigBlk:\t0000000000000000") != std::string::npos);
  EXPECT(child.output.find("SigIgn:\t0000000000000000") != std::string::npos);
  EXPECT_EQ(child.exit, 0);
}

TEST(standard_descriptors_as_output) {
  // Sources below 3 must survive the moves: hand over 1 and 2 in exchanged roles.
  Pipe output;
  Pipe errors;
  const Fd saved_out(::fcntl(1, F_DUPFD_CLOEXEC, 10));
  const Fd saved_err(::fcntl(2, F_DUPFD_CLOEXEC, 10));
  ::dup2(output.write.get(), 2);
  ::dup2(errors.write.get(), 1);
  SpawnRequest request = shell("echo out; echo err >&2");
  request.stdout_fd = 2;
  request.stderr_fd = 1;
  pid_t pid = -1;
  int error = 0;
  const Status status = spawn(request, &pid, &error);
  ::dup2(saved_out.get(), 1);
  ::dup2(saved_err.get(), 2);
  CHECK_OK(status);
  EXPECT_EQ(output.drain(), "out\n");
  EXPECT_EQ(errors.drain(), "err\n");
  EXPECT_EQ(exit_status(pid), 0);
}

void expect_error(const std::string& program, const std::string& folder, int error, const std::string& words) {
  SpawnRequest request = shell("true");
  request.argv[0] = program;
  request.cwd = folder;
  const Child child(request);
  EXPECT_EQ(child.error, error);
  EXPECT_EQ(child.pid, -1);
  test::has(child.status, words);
}

TEST(errors_name_program_and_folder) {
  expect_error("no-such-program-here", "/", ENOENT, "no-such-program-here");
  expect_error("sh", "/no/such/folder", ENOENT, "/no/such/folder");
  expect_error("sh", "/no/such/folder", ENOENT, "chdir");
  expect_error("/etc/passwd", "/", EACCES, "/etc/passwd");
  pid_t pid = 0;
  int error = 0;
  SpawnRequest request = shell("true");
  request.stdout_fd = 12345;
  EXPECT(!spawn(request, &pid, &error));
  EXPECT_EQ(error, EBADF);
  request.argv.clear();
  EXPECT(!spawn(request, &pid, &error));
  EXPECT_EQ(error, EINVAL);
  errno = 0;
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);  // no zombie is left
  EXPECT_EQ(errno, ECHILD);
}

TEST(survives_the_calling_thread) {
  Pipe output;
  pid_t pid = -1;
  std::thread caller([&] {
    int error = 0;
    SpawnRequest request = shell("sleep 0.3; echo alive");
    request.stdout_fd = request.stderr_fd = output.write.get();
    EXPECT_OK(spawn(request, &pid, &error));
  });
  caller.join();
  EXPECT_EQ(output.drain(), "alive\n");
  EXPECT_EQ(exit_status(pid), 0);
}

constexpr uid_t kNobody = 65534;

SpawnUser nobody() {
  SpawnUser user;
  user.uid = user.gid = kNobody;
  user.groups = {kNobody, 7, 9};
  user.umask = 027;
  user.limits = {{RLIMIT_CORE, 0, 0}, {RLIMIT_NOFILE, 100, 200}};
  return user;
}

TEST(becomes_another_user) {
  SpawnRequest request = shell("id -u; id -g; id -G; umask; ulimit -c; ulimit -n; ulimit -Hn");
  request.argv[2] += "; sed -n 's/^Cap\\(Inh\\|Prm\\|Eff\\|Amb\\):.//p' /proc/self/status | sort -u";
  request.user = nobody();
  const Child child(request);
  if (::geteuid() != 0) {
    EXPECT_EQ(child.error, EPERM);
    test::has(child.status, "setgroups");
    return;
  }
  CHECK_OK(child.status);
  EXPECT_EQ(child.output, "65534\n65534\n65534 7 9\n0027\n0\n100\n200\n0000000000000000\n");
  EXPECT_EQ(child.exit, 0);
}

TEST(another_user_enters_the_folder) {
  if (::geteuid() != 0) test::skip("needs root");
  SpawnRequest request = shell("pwd");
  request.user = nobody();
  char closed[] = "/tmp/bagua-spawn-XXXXXX";
  CHECK(::mkdtemp(closed) != nullptr);  // mode 0700
  request.cwd = closed;
  const Child child(request);
  ::rmdir(closed);
  EXPECT_EQ(child.error, EACCES);
  test::has(child.status, "chdir: ");
}

void check_death_with_the_process(std::optional<SpawnUser> user) {
#if defined(__SANITIZE_THREAD__)
  test::skip("TSan does not follow fork() in a program with threads");
#endif
  Pipe output;
  Pipe numbers;
  const pid_t parent = ::fork();
  if (parent == 0) {
    pid_t pid = -1;
    int error = 0;
    SpawnRequest request = shell("exec sleep 60");
    request.stdout_fd = request.stderr_fd = output.write.get();
    request.user = std::move(user);
    const Status status = spawn(request, &pid, &error);
    if (!status || ::write(numbers.write.get(), &pid, sizeof pid) != sizeof pid) ::_exit(1);
    for (;;) ::pause();
  }
  pid_t grandchild = -1;
  CHECK(::read(numbers.read.get(), &grandchild, sizeof grandchild) == sizeof grandchild);
  CHECK(grandchild > 0);
  ::kill(parent, SIGKILL);
  exit_status(parent);
  EXPECT_EQ(output.drain(), "");  // ends when the grandchild, the last writer, is gone
}

TEST(dies_with_the_process) {
  check_death_with_the_process(std::nullopt);
}

TEST(another_user_dies_with_the_process) {
  if (::geteuid() != 0) test::skip("needs root");
  check_death_with_the_process(nobody());
}

}  // namespace
}  // namespace bagua
