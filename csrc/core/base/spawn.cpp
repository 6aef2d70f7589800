#include "base/spawn.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/keyctl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/mutex.h"
#include "base/text.h"

namespace bagua {
namespace {

constexpr auto kExecDeadline = std::chrono::seconds(10);

// The kernel's struct rlimit64.
struct KernelLimit {
  uint64_t soft;
  uint64_t hard;
};

// As plain memory: what a SpawnUser says.
struct ChildUser {
  bool wanted = false;
  uid_t uid = 0;
  gid_t gid = 0;
  const gid_t* groups = nullptr;
  size_t n_groups = 0;
  mode_t umask = 0;
  const SpawnUser::Limit* limits = nullptr;
  size_t n_limits = 0;
};

// Everything that the child needs, prepared before clone: until execve the child shares our memory and may only make
// system calls.
struct Child {
  const char* program;
  char* const* argv;
  char* const* env;
  const char* cwd;
  int stdout_fd;
  int stderr_fd;
  int death_signal;
  pid_t parent;
  ChildUser user;
  // Written by the child, into the memory that both share:
  const char* step = nullptr;
  int error = 0;
};

#if defined(__SANITIZE_THREAD__)
// glibc's clone() without TSan's interceptor, which would mark this process as forked.
extern "C" int __clone(int (*)(void*), void*, int, void*, ...);
constexpr auto start_child = __clone;
#else
constexpr auto start_child = ::clone;
#endif

// The child calls syscall(2) directly: sanitizers intercept the usual wrappers, and would change the parent's state.
#if defined(__SANITIZE_THREAD__)
#define BAGUA_IN_CHILD __attribute__((noinline, no_sanitize("thread")))
#elif defined(__SANITIZE_ADDRESS__)
#define BAGUA_IN_CHILD __attribute__((noinline, no_sanitize("address", "undefined")))
#else
#define BAGUA_IN_CHILD __attribute__((noinline))
#endif

BAGUA_IN_CHILD int fail(Child* child, const char* step) {
  child->error = errno;
  child->step = step;
  return 127;
}

BAGUA_IN_CHILD void close_from(unsigned first) {
#if defined(SYS_close_range)
  if (::syscall(SYS_close_range, first, ~0u, 0u) == 0) return;
#endif
  for (unsigned fd = first; fd < (1u << 20); ++fd) ::syscall(SYS_close, fd);
}

// Sets all signals to their default action and unblocks them.
BAGUA_IN_CHILD void reset_signals() {
  const uint64_t zeros[4] = {0, 0, 0, 0};  // the kernel's struct sigaction: SIG_DFL, no flags, empty mask
  constexpr size_t kMaskBytes = 8;
  for (int signal = 1; signal <= 64; ++signal) {
    if (signal != SIGKILL && signal != SIGSTOP) ::syscall(SYS_rt_sigaction, signal, zeros, nullptr, kMaskBytes);
  }
}

// Becomes the user for good; returns the step that failed, or nullptr. The system calls concern this process alone,
// though it shares our memory: glibc's wrappers would look for threads of ours.
BAGUA_IN_CHILD const char* become(const ChildUser& user) {
  for (size_t i = 0; i < user.n_limits; ++i) {
    const KernelLimit limit{user.limits[i].soft, user.limits[i].hard};
    if (::syscall(SYS_prlimit64, 0, user.limits[i].resource, &limit, nullptr) != 0) return "setting a limit";
  }
  if (::syscall(SYS_setgroups, user.n_groups, user.groups) != 0) return "setgroups";
  if (::syscall(SYS_setresgid, user.gid, user.gid, user.gid) != 0) return "setresgid";
  if (::syscall(SYS_setresuid, user.uid, user.uid, user.uid) != 0) return "setresuid";
  // The change of user has dropped them, unless this process was told to keep them (securebits).
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct none[2]{};
  if (user.uid != 0 && ::syscall(SYS_capset, &header, none) != 0) return "capset";
  ::syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, nullptr);  // a new one; not every kernel has keyrings
  ::syscall(SYS_umask, user.umask);
  return nullptr;
}

BAGUA_IN_CHILD int run_child(void* argument) {
  auto* child = static_cast<Child*>(argument);
  reset_signals();
  if (::syscall(SYS_setsid) < 0) return fail(child, "setsid");
  if (child->user.wanted) {  // before the death signal, which a change of user clears
    if (const char* step = become(child->user)) return fail(child, step);
  }
  if (child->death_signal != 0) {
    if (::syscall(SYS_prctl, PR_SET_PDEATHSIG, child->death_signal, 0, 0, 0) != 0) return fail(child, "prctl");
    if (::syscall(SYS_getppid) != child->parent) {  // the daemon died before the death signal was requested
      errno = ESRCH;
      return fail(child, "getppid");
    }
  }
  // Moves both descriptors above 2 first, so that the dup3 calls below overwrite neither.
  const long out = ::syscall(SYS_fcntl, child->stdout_fd, F_DUPFD, 3);
  if (out < 0) return fail(child, "stdout");
  const long err = ::syscall(SYS_fcntl, child->stderr_fd, F_DUPFD, 3);
  if (err < 0) return fail(child, "stderr");
  const long in = ::syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDONLY);
  if (in < 0) return fail(child, "open /dev/null");
  if (in != 0 && ::syscall(SYS_dup3, in, 0, 0) < 0) return fail(child, "stdin");
  if (::syscall(SYS_dup3, out, 1, 0) < 0 || ::syscall(SYS_dup3, err, 2, 0) < 0) return fail(child, "dup3");
  if (child->cwd[0] != '\0' && ::syscall(SYS_chdir, child->cwd) != 0) return fail(child, "chdir");
  close_from(3);
  const uint64_t no_signal = 0;
  ::syscall(SYS_rt_sigprocmask, SIG_SETMASK, &no_signal, nullptr, sizeof no_signal);
  ::syscall(SYS_execve, child->program, child->argv, child->env);
  return fail(child, "execve");
}

// A thread that makes all clone calls and never ends: the kernel sends the death signal (PR_SET_PDEATHSIG) when the
// parent *thread* ends.
class Spawner {
 public:
  static Spawner& get() {
    static Mutex mutex;
    static Spawner* instance = nullptr;  // never deleted: its thread uses it until the process ends
    const Lock lock(mutex);
    if (instance == nullptr || instance->owner_ != ::getpid()) instance = new Spawner;
    return *instance;
  }

  pid_t run(Child* child) {
    const Lock one_at_a_time(callers_);
    Lock lock(mutex_);
    child_ = child;
    starting_ = 0;
    changed_.notify_all();
    const auto started = [this]() REQUIRES(mutex_) { return child_ == nullptr; };
    if (child->user.wanted) {
      if (!changed_.wait_for(lock, kExecDeadline, started) && starting_ > 0) {
        ::kill(starting_, SIGKILL);
        changed_.wait(lock, started);
        if (child->step == nullptr) {
          child->step = "the program did not begin";
          child->error = ETIMEDOUT;
        }
      }
    }
    changed_.wait(lock, started);
    return pid_;
  }

 private:
  Spawner() : owner_(::getpid()) { std::thread(&Spawner::serve, this).detach(); }

  void serve() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, nullptr);  // so that no handler of ours runs in the child
    constexpr size_t kStack = 64 << 10;
    void* stack = ::mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    Lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this]() REQUIRES(mutex_) { return child_ != nullptr; });
      if (stack == MAP_FAILED) {
        pid_ = -1;
        child_->error = ENOMEM;
      } else {
        Child* const child = child_;
        lock.unlock();
        constexpr int kFlags = CLONE_VM | CLONE_VFORK | CLONE_PARENT_SETTID | SIGCHLD;
        const pid_t pid = start_child(run_child, static_cast<char*>(stack) + kStack, kFlags, child, &starting_);
        const int error = errno;
        lock.lock();
        pid_ = pid;
        if (pid < 0) child->error = error;
      }
      child_ = nullptr;
      changed_.notify_all();
    }
  }

  const pid_t owner_;
  Mutex callers_;  // taken before mutex_
  Mutex mutex_;
  Condition changed_;
  Child* child_ GUARDED_BY(mutex_) = nullptr;
  pid_t pid_ GUARDED_BY(mutex_) = -1;
  volatile pid_t starting_ = 0;  // written by the kernel before the child runs
};

bool runnable(const std::string& path) {
  struct stat info{};
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && ::access(path.c_str(), X_OK) == 0;
}

// Finds the program as execvp would, but with the child's PATH. Relative entries start at the child's folder.
std::string find_program(const SpawnRequest& request) {
  const std::string& name = request.argv[0];
  if (name.find('/') != std::string::npos) return name;
  std::string path = "/usr/local/bin:/usr/bin:/bin";
  for (const std::string& entry : request.env) {
    if (entry.rfind("PATH=", 0) == 0) path = entry.substr(5);
  }
  for (size_t start = 0; start <= path.size();) {
    const size_t end = std::min(path.find(':', start), path.size());
    std::string folder = path.substr(start, end - start);
    if (folder.empty() || folder[0] != '/') folder = request.cwd + "/" + folder;
    if (runnable(folder + "/" + name)) return folder + "/" + name;
    start = end + 1;
  }
  return {};
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

ChildUser plain(const std::optional<SpawnUser>& user) {
  if (!user) return {};
  return {true,        user->uid,           user->gid,          user->groups.data(), user->groups.size(),
          user->umask, user->limits.data(), user->limits.size()};
}

std::string describe(const SpawnRequest& request, const std::string& what) {
  return "can't start '" + request.argv[0] + "' in folder '" + request.cwd + "': " + what;
}

}  // namespace

Status spawn(const SpawnRequest& request, pid_t* pid, int* error) {
  *pid = -1;
  *error = EINVAL;
  if (request.argv.empty() || request.argv[0].empty()) {
    return {Code::kInvalid, "can't start a program: the command is empty"};
  }
  const std::string program = find_program(request);
  if (program.empty()) {
    *error = ENOENT;
    return {Code::kInvalid, describe(request, "no such program in PATH")};
  }
  const std::vector<char*> argv = pointers(request.argv);
  const std::vector<char*> env = pointers(request.env);
  Child child{program.c_str(),   argv.data(),          env.data(), request.cwd.c_str(), request.stdout_fd,
              request.stderr_fd, request.death_signal, ::getpid(), plain(request.user)};
  const pid_t started = Spawner::get().run(&child);
  *error = child.error;
  if (started < 0) return {Code::kResource, describe(request, "clone: " + errno_text(child.error))};
  if (child.step != nullptr) {
    int ignored;
    while (::waitpid(started, &ignored, 0) < 0 && errno == EINTR) {
    }
    const std::string step = std::strcmp(child.step, "execve") == 0 ? "" : std::string(child.step) + ": ";
    return {Code::kInvalid, describe(request, step + errno_text(child.error))};
  }
  *pid = started;
  return Status::ok();
}

}  // namespace bagua
