// Memory that a host can still give, by its control groups, and requests that do not fit.
#include "engine/values/budget.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <string>

#include "harness.h"

namespace bagua {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/bagua-cgroup-XXXXXX";
    path_ = mkdtemp(name);
  }
  ~Folder() { static_cast<void>(system(("rm -r " + path_).c_str())); }
  const std::string& path() const { return path_; }
  void folder(const std::string& name) { CHECK_EQ(mkdir((path_ + name).c_str(), 0700), 0); }
  void write(const std::string& name, const std::string& text) { std::ofstream(path_ + name) << text; }

 private:
  std::string path_;
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(cgroup_version_2_counts_ancestors_and_droppable_cache) {
  Folder mount;
  mount.folder("/pod");
  mount.folder("/pod/job");
  mount.write("/pod/memory.max", "1000\n");
  mount.write("/pod/memory.current", "700\n");
  mount.write("/pod/memory.stat", "anon 500\nfile 200\ninactive_file 100\nactive_file 50\n");
  mount.write("/pod/job/memory.max", "max\n");
  mount.write("/pod/job/memory.current", "10\n");
  CHECK_EQ(cgroup_headroom("0::/pod/job\n", mount.path()).bytes, uint64_t{450});
  mount.write("/pod/job/memory.max", "100\n");
  CHECK_EQ(cgroup_headroom("0::/pod/job\n", mount.path()).bytes, uint64_t{90});
  CHECK_EQ(cgroup_headroom("0::/elsewhere\n", mount.path()).bytes, UINT64_MAX);
}

// On a virtual machine a limit left no memory at all to a process that had some, on a host that had 125 GiB.
TEST(a_group_has_no_less_than_a_process_of_it_and_no_more_than_the_host) {
  Folder mount;
  mount.folder("/pod");
  mount.write("/pod/memory.max", "1000\n");
  mount.write("/pod/memory.current", "1000\n");
  const Headroom room = cgroup_headroom("0::/pod\n", mount.path(), 1000, 1000);
  CHECK_EQ(room.bytes, uint64_t{0});
  CHECK(has(room.bound, mount.path() + "/pod: 0 MiB"));
  CHECK_EQ(cgroup_headroom("0::/pod\n", mount.path(), 1000, 999).bytes, UINT64_MAX);
  CHECK_EQ(cgroup_headroom("0::/pod\n", mount.path(), 1001, 2000).bytes, UINT64_MAX);
}

TEST(cgroup_version_1_and_a_container_that_sees_only_its_own) {
  Folder mount;
  mount.folder("/memory");
  mount.write("/memory/memory.limit_in_bytes", "5000");
  mount.write("/memory/memory.usage_in_bytes", "6000");
  // The kernel would not let a group have more than a limit that it enforces.
  CHECK_EQ(cgroup_headroom("9:cpu,cpuacct:/x\n4:memory:/docker/abc\n", mount.path()).bytes, UINT64_MAX);
  mount.write("/memory/memory.usage_in_bytes", "5000");
  CHECK_EQ(cgroup_headroom("9:cpu,cpuacct:/x\n4:memory:/docker/abc\n", mount.path()).bytes, uint64_t{0});
  mount.write("/memory/memory.usage_in_bytes", "1000");
  const Headroom room = cgroup_headroom("4:memory:/docker/abc\n0::/\n", mount.path());
  CHECK_EQ(room.bytes, uint64_t{4000});
  CHECK(has(room.bound, "control group"));
  CHECK_EQ(cgroup_headroom("garbage\n4:cpu:/\n::\n", "/nonexistent").bytes, UINT64_MAX);
}

TEST(a_job_that_does_not_fit_is_told_all_it_needs) {
  std::atomic<uint64_t> in_use{0};
  Budget budget(0, 4, &in_use, [] { return Headroom{1000 * kMiB, "a test"}; });
  const Status status = budget.require(2, 300 * kMiB);
  CHECK(status.code() == Code::kResource);
  CHECK(has(status.message(), "needs 1200 MiB of shared memory on this host (4 ranks, 300 MiB for rank 2)"));
  CHECK(has(status.message(), "can get 1000 MiB more, bounded by a test"));
  CHECK_OK(budget.require(2, 250 * kMiB));
  CHECK_OK(budget.require(1, 250 * kMiB));
  CHECK(!budget.require(0, 501 * kMiB));
  CHECK(!budget.require(3, UINT64_MAX));
}

TEST(what_a_rank_has_got_is_not_needed_again) {
  std::atomic<uint64_t> in_use{0};
  Budget budget(1000 * kMiB, 2, &in_use, [] { return Headroom{}; });
  CHECK_OK(budget.require(0, 500 * kMiB));
  CHECK_OK(budget.allow(0, 400 * kMiB));
  in_use = 400 * kMiB;
  budget.took(0, 400 * kMiB);
  CHECK_OK(budget.require(1, 500 * kMiB));
  in_use = 900 * kMiB;
  budget.took(1, 500 * kMiB);
  CHECK_OK(budget.allow(0, 100 * kMiB));
  const Status status = budget.allow(1, 101 * kMiB);
  CHECK(has(status.message(), "asks for 101 MiB of shared memory, but only 100 MiB are left"));
  CHECK(has(status.message(), "limit of this engine, 1000 MiB. This job holds 900 MiB on this host, and needs 1000"));
}

}  // namespace bagua
