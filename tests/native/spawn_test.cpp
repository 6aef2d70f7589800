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

SpawnRequest shell(const std::string& script, const Pipe& output) {
  SpawnRequest request;
  request.argv = {"sh", "-c", script};
  request.env = {"PATH=/usr/bin:/bin", "GREETING=hello"};
  request.cwd = "/";
  request.stdout_fd = output.write.get();
  request.stderr_fd = output.write.get();
  return request;
}

int exit_status(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

TEST(environment_folder_output) {
  Pipe output;
  pid_t pid = -1;
  int error = 0;
  CHECK_OK(spawn(shell("pwd; echo $GREETING; echo problem >&2; cat; env | grep -c = ; exit 7", output), &pid, &error));
  EXPECT_EQ(output.drain().substr(0, 16), "/\nhello\nproblem\n");
  const int status = exit_status(pid);
  EXPECT(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

TEST(no_descriptor_is_inherited) {
  Fd leak(::open("/dev/null", O_RDONLY));  // not close-on-exec
  Pipe output;
  pid_t pid = -1;
  int error = 0;
  CHECK_OK(
      spawn(shell("for fd in /proc/self/fd/*; do readlink $fd || true; done; ls /proc/$$/fd | tr '\\n' ' '", output),
            &pid, &error));
  const std::string text = output.drain();
  EXPECT(text.find("0 1 2 ") != std::string::npos);
  EXPECT_EQ(exit_status(pid), 0);
}

TEST(own_session_and_process_group) {
  Pipe output;
  pid_t pid = -1;
  int error = 0;
  CHECK_OK(spawn(shell("cut -d' ' -f5,6 /proc/$$/stat; echo $$; kill -TERM $$", output), &pid, &error));
  const std::string id = std::to_string(pid);
  EXPECT_EQ(output.drain(), id + " " + id + "\n" + id + "\n");
  const int status = exit_status(pid);
  EXPECT(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
}

TEST(default_signals) {
  ::signal(SIGPIPE, SIG_IGN);  // as Python does
  sigset_t blocked;
  sigset_t before;
  ::sigemptyset(&blocked);
  ::sigaddset(&blocked, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &blocked, &before);
  Pipe output;
  SpawnRequest request = shell("", output);
  // No shell between: it blocks signals for moments of its own.
  request.argv = {"grep", "-E", "Sig(Blk|Ign|Cgt)", "/proc/self/status"};
  pid_t pid = -1;
  int error = 0;
  const Status status = spawn(request, &pid, &error);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::signal(SIGPIPE, SIG_DFL);
  CHECK_OK(status);
  const std::string text = output.drain();
  EXPECT(text.find("SigBlk:\t0000000000000000") != std::string::npos);
  EXPECT(text.find("SigIgn:\t0000000000000000") != std::string::npos);
  EXPECT_EQ(exit_status(pid), 0);
}

TEST(standard_descriptors_as_output) {
  // Sources below 3 must survive the moves: hand over 1 and 2 in exchanged roles.
  Pipe output;
  Pipe errors;
  const Fd saved_out(::fcntl(1, F_DUPFD_CLOEXEC, 10));
  const Fd saved_err(::fcntl(2, F_DUPFD_CLOEXEC, 10));
  ::dup2(output.write.get(), 2);
  ::dup2(errors.write.get(), 1);
  SpawnRequest request = shell("echo out; echo err >&2", output);
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

TEST(errors_name_program_and_folder) {
  Pipe output;
  pid_t pid = 0;
  int error = 0;
  SpawnRequest request = shell("true", output);
  request.argv[0] = "no-such-program-here";
  Status status = spawn(request, &pid, &error);
  EXPECT(!status);
  EXPECT_EQ(error, ENOENT);
  EXPECT_EQ(pid, -1);
  EXPECT(status.message().find("no-such-program-here") != std::string::npos);

  request = shell("true", output);
  request.cwd = "/no/such/folder";
  status = spawn(request, &pid, &error);
  EXPECT(!status);
  EXPECT_EQ(error, ENOENT);
  EXPECT(status.message().find("/no/such/folder") != std::string::npos);
  EXPECT(status.message().find("chdir") != std::string::npos);

  request = shell("true", output);
  request.argv[0] = "/etc/passwd";
  status = spawn(request, &pid, &error);
  EXPECT(!status);
  EXPECT_EQ(error, EACCES);

  request.argv.clear();
  EXPECT(!spawn(request, &pid, &error));
  EXPECT_EQ(error, EINVAL);
  request = shell("true", output);
  request.stdout_fd = 12345;
  EXPECT(!spawn(request, &pid, &error));
  EXPECT_EQ(error, EBADF);
  errno = 0;
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);  // no zombie is left
  EXPECT_EQ(errno, ECHILD);
}

TEST(survives_the_calling_thread) {
  Pipe output;
  pid_t pid = -1;
  std::thread caller([&] {
    int error = 0;
    EXPECT_OK(spawn(shell("sleep 0.3; echo alive", output), &pid, &error));
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
  Pipe output;
  SpawnRequest request = shell("id -u; id -g; id -G; umask; ulimit -c; ulimit -n; ulimit -Hn", output);
  request.argv[2] += "; sed -n 's/^Cap\\(Inh\\|Prm\\|Eff\\|Amb\\):.//p' /proc/self/status | sort -u";
  request.user = nobody();
  pid_t pid = -1;
  int error = 0;
  const Status status = spawn(request, &pid, &error);
  if (::geteuid() != 0) {
    EXPECT_EQ(error, EPERM);
    EXPECT(status.message().find("setgroups") != std::string::npos);
    return;
  }
  CHECK_OK(status);
  EXPECT_EQ(output.drain(), "65534\n65534\n65534 7 9\n0027\n0\n100\n200\n0000000000000000\n");
  EXPECT_EQ(exit_status(pid), 0);
}

TEST(another_user_enters_the_folder) {
  if (::geteuid() != 0) test::skip("needs root");
  Pipe output;
  SpawnRequest request = shell("pwd", output);
  request.user = nobody();
  char closed[] = "/tmp/bagua-spawn-XXXXXX";
  CHECK(::mkdtemp(closed) != nullptr);  // mode 0700
  request.cwd = closed;
  pid_t pid = -1;
  int error = 0;
  const Status status = spawn(request, &pid, &error);
  ::rmdir(closed);
  EXPECT(!status);
  EXPECT_EQ(error, EACCES);
  EXPECT(status.message().find("chdir: ") != std::string::npos);
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
    SpawnRequest request = shell("exec sleep 60", output);
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
