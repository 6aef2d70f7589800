// Emulates a network between two or more network namespaces, for kernels without netem. It creates a TUN device in each
// namespace and forwards every packet after a fixed delay, at the limited rate of its sender.
//
//     delay_relay NAMESPACE... DEVICE DELAY_US BITS_PER_S     (0: no limit of the rate)
//
// With more than two namespaces a packet goes to the one whose place, from 1, is the last number of its IPv4 address.
// Namespaces are names of `ip netns`. Prints "ready" once both devices exist (without addresses, down). Ends, and
// removes the devices, when standard input is closed, its parent dies, or it gets SIGTERM. Not part of the core.
//
// Packets keep their segmentation offload (up to 64 KiB per read), so that it can forward several Gbit/s. The rate
// counts each segment with its headers and 14 bytes of Ethernet, as tbf on a veth pair does.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <limits>
#include <string>
#include <vector>

namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr int64_t kRetryNs = 100'000;            // pause before a device whose queue is full is tried again
constexpr size_t kQueueBytes = size_t{4} << 20;  // packets are dropped when more bytes than this wait, as in a switch
constexpr int kBatch = 64;                       // packets read from one side before it is the other side's turn
constexpr size_t kEthernetHeader = 14;

// The header before each packet of a device with IFF_VNET_HDR: virtio_net_hdr of linux/virtio_net.h, which does not
// compile as C++.
struct OffloadHeader {
  uint8_t flags, gso_type;
  uint16_t hdr_len, gso_size, csum_start, csum_offset;
};
static_assert(sizeof(OffloadHeader) == 10);

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

// Creates a TUN device in a namespace, then returns this thread to its own namespace.
int open_tun(const std::string& name, const std::string& device) {
  const std::string path = "/run/netns/" + name;
  const int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  const int there = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (home < 0 || there < 0 || setns(there, CLONE_NEWNET) != 0) fail(path);
  const int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (tun < 0) fail("/dev/net/tun");
  ifreq request{};
  std::snprintf(request.ifr_name, sizeof request.ifr_name, "%s", device.c_str());
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(tun, TUNSETIFF, &request) != 0) fail("TUN device " + device);
  int header = sizeof(OffloadHeader);
  if (ioctl(tun, TUNSETVNETHDRSZ, &header) != 0 ||
      ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) != 0) {
    fail("offloads of TUN device " + device);
  }
  if (setns(home, CLONE_NEWNET) != 0) fail("return to the own namespace");
  close(home);
  close(there);
  return tun;
}

// Size on an Ethernet wire of a packet that was read from the device, in bytes.
size_t wire_bytes(const char* data, size_t size) {
  OffloadHeader header;
  if (size < sizeof header) return 0;
  std::memcpy(&header, data, sizeof header);
  const size_t packet = size - sizeof header;
  if (header.gso_size == 0 || header.hdr_len >= packet) {
    return packet + kEthernetHeader;
  }
  const size_t payload = packet - header.hdr_len;
  const size_t segments = (payload + header.gso_size - 1) / header.gso_size;
  return payload + segments * (header.hdr_len + kEthernetHeader);
}

constexpr int kNobody = -1;

// The place in `devices` of the one that a packet of device `from` is for.
int target_of(const char* data, size_t size, size_t from, size_t devices) {
  if (devices == 2) return from == 0 ? 1 : 0;
  constexpr size_t kLastOfAddress = sizeof(OffloadHeader) + 19;  // of the destination in a header of IPv4
  if (size <= kLastOfAddress || (static_cast<uint8_t>(data[sizeof(OffloadHeader)]) >> 4) != 4) return kNobody;
  const size_t place = static_cast<uint8_t>(data[kLastOfAddress]);
  return place == 0 || place > devices || place - 1 == from ? kNobody : static_cast<int>(place - 1);
}

// All that one device sends: its packets wait here until they are due at other devices.
class Uplink {
 public:
  Uplink(const std::vector<int>& devices, size_t from, int64_t delay_ns, double bits_per_s)
      : devices_(devices), from_(from), delay_ns_(delay_ns), bits_per_s_(bits_per_s) {}

  // Reads packets that have arrived.
  void take() {
    static std::array<char, size_t{1} << 17> buffer;
    for (int i = 0; i < kBatch; ++i) {
      const ssize_t got = read(devices_[from_], buffer.data(), buffer.size());
      if (got <= 0) return;
      const auto size = static_cast<size_t>(got);
      const int target = target_of(buffer.data(), size, from_, devices_.size());
      if (target == kNobody || queued_bytes_ + size > kQueueBytes) continue;
      const int64_t now = now_ns();
      if (bits_per_s_ > 0) {
        const double ns = static_cast<double>(wire_bytes(buffer.data(), size)) * 8e9 / bits_per_s_;
        line_free_ns_ = std::max(line_free_ns_, now) + static_cast<int64_t>(ns);
      } else {
        line_free_ns_ = now;
      }
      queue_.push_back({line_free_ns_ + delay_ns_, target, std::vector<char>(buffer.data(), buffer.data() + size)});
      queued_bytes_ += size;
    }
  }

  // Writes packets that are due. Returns when the next packet is due (kNever: none waits).
  int64_t give() {
    const int64_t now = now_ns();
    while (!queue_.empty()) {
      const Packet& packet = queue_.front();
      if (packet.due_ns > now) return packet.due_ns;
      const int to = devices_[static_cast<size_t>(packet.target)];
      if (write(to, packet.data.data(), packet.data.size()) < 0 && errno == EAGAIN) return now + kRetryNs;
      queued_bytes_ -= packet.data.size();
      queue_.pop_front();
    }
    return kNever;
  }

 private:
  struct Packet {
    int64_t due_ns;
    int target;  // place of its device
    std::vector<char> data;
  };

  const std::vector<int>& devices_;
  const size_t from_;
  const int64_t delay_ns_;
  const double bits_per_s_;
  std::deque<Packet> queue_;
  size_t queued_bytes_ = 0;
  int64_t line_free_ns_ = 0;  // when the latest packet will have left, at the given rate
};

void relay(const std::vector<int>& devices, int64_t delay_ns, double bits_per_s) {
  std::vector<Uplink> uplinks;
  std::vector<pollfd> ready{{STDIN_FILENO, POLLIN, 0}};
  for (size_t place = 0; place < devices.size(); ++place) {
    uplinks.emplace_back(devices, place, delay_ns, bits_per_s);
    ready.push_back({devices[place], POLLIN, 0});
  }
  for (;;) {
    int64_t next = kNever;
    for (Uplink& uplink : uplinks) uplink.take();
    for (Uplink& uplink : uplinks) next = std::min(next, uplink.give());
    timespec wait{};
    if (next != kNever) {
      const int64_t left = std::max<int64_t>(0, next - now_ns());
      wait = {left / 1'000'000'000, left % 1'000'000'000};
    }
    if (ppoll(ready.data(), ready.size(), next == kNever ? nullptr : &wait, nullptr) > 0 && ready[0].revents != 0) {
      return;  // standard input has been closed
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) {
    std::fprintf(stderr, "usage: delay_relay NAMESPACE... DEVICE DELAY_US BITS_PER_S\n");
    return 2;
  }
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  prctl(PR_SET_TIMERSLACK, 1);
  std::vector<int> devices;
  for (int i = 1; i < argc - 3; ++i) devices.push_back(open_tun(argv[i], argv[argc - 3]));
  std::puts("ready");
  std::fflush(stdout);
  relay(devices, std::atoll(argv[argc - 2]) * 1000, std::atof(argv[argc - 1]));
  return 0;
}
