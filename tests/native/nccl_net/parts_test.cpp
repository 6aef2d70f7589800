// Settings, choice of interfaces, and the forms of the table.
#include <arpa/inet.h>
#include <sys/mman.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

#include "nccl_net/connector.h"
#include "nccl_net/devices.h"
#include "nccl_net/ordered_copy.h"
#include "nccl_net/settings.h"
#include "rig.h"

namespace bagua::nccl_net::rig {
namespace {

Interface interface(const char* name, const char* address, bool loopback = false) {
  Interface out{name, {}, loopback};
  std::memset(static_cast<void*>(&out.address), 0, sizeof out.address);
  if (std::strchr(address, ':') != nullptr) {
    out.address.v6.sin6_family = AF_INET6;
    CHECK(::inet_pton(AF_INET6, address, &out.address.v6.sin6_addr) == 1);
  } else {
    out.address.v4.sin_family = AF_INET;
    CHECK(::inet_pton(AF_INET, address, &out.address.v4.sin_addr) == 1);
  }
  return out;
}

std::string chosen(const std::string& names, int family) {
  const std::vector<Interface> found = {interface("lo", "127.0.0.1", true), interface("docker0", "172.17.0.1"),
                                        interface("eth0", "fe80::1"),       interface("eth0", "fd00::5"),
                                        interface("eth0", "10.0.0.5"),      interface("eth10", "10.0.1.5"),
                                        interface("ens3", "fe80::2"),       interface("lo", "::1", true)};
  std::string out;
  for (const Interface& item : choose_interfaces(found, names, family)) {
    const std::string address = address_text(item.address);
    out += item.name + "=" + address.substr(0, address.rfind(':')) + " ";
  }
  return out;
}

TEST(interfaces_are_chosen_as_nccl_does) {
  EXPECT_EQ(chosen("", AF_UNSPEC), "eth0=10.0.0.5 eth10=10.0.1.5 ens3=[fe80::2] ");
  EXPECT_EQ(chosen("", AF_INET6), "eth0=[fd00::5] ens3=[fe80::2] ");
  EXPECT_EQ(chosen("eth", AF_INET), "eth0=10.0.0.5 eth10=10.0.1.5 ");
  EXPECT_EQ(chosen("=eth1", AF_UNSPEC), "");
  EXPECT_EQ(chosen("=eth0,docker0", AF_UNSPEC), "docker0=172.17.0.1 eth0=10.0.0.5 ");
  EXPECT_EQ(chosen("^eth,docker", AF_UNSPEC), "lo=127.0.0.1 ens3=[fe80::2] ");
  EXPECT_EQ(chosen("^=eth0,lo", AF_INET), "docker0=172.17.0.1 eth10=10.0.1.5 ");
  EXPECT_EQ(chosen("lo", AF_INET6), "lo=[::1] ");
  EXPECT_EQ(chosen("nothing", AF_UNSPEC), "");
}

TEST(without_other_interfaces_docker_then_loopback) {
  std::vector<Interface> found = {interface("lo", "127.0.0.1", true)};
  CHECK_EQ(choose_interfaces(found, "", AF_UNSPEC).size(), 1u);
  EXPECT_EQ(choose_interfaces(found, "", AF_UNSPEC)[0].name, "lo");
  found.push_back(interface("virbr0", "192.168.122.1"));  // the same on each host
  EXPECT_EQ(choose_interfaces(found, "", AF_UNSPEC)[0].name, "lo");
  found.push_back(interface("docker0", "172.17.0.1"));
  EXPECT_EQ(choose_interfaces(found, "", AF_UNSPEC)[0].name, "docker0");
  found.push_back(interface("eth0", "10.0.0.1"));
  found.push_back(interface("ib0", "10.1.0.1"));
  CHECK_EQ(choose_interfaces(found, "", AF_UNSPEC).size(), 1u);
  EXPECT_EQ(choose_interfaces(found, "", AF_UNSPEC)[0].name, "ib0");
}

// A copy that is stopped where a page can't be written: what lies before has been copied by then.
struct Watched {
  static constexpr size_t kPage = 4096;
  char* memory;  // two pages; the second can't be written at first
  const char* from;
  char* to;
  bool stopped;
  bool in_order;
};
Watched watched;

void look_at_copy(int) {
  const auto before = static_cast<size_t>(watched.memory + Watched::kPage - watched.to);
  watched.in_order = std::memcmp(watched.to, watched.from, before) == 0;
  watched.stopped = true;
  ::mprotect(watched.memory + Watched::kPage, Watched::kPage, PROT_READ | PROT_WRITE);
}

TEST(staged_bytes_appear_in_order) {
  watched.memory = static_cast<char*>(
      ::mmap(nullptr, 2 * Watched::kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(watched.memory != MAP_FAILED);
  struct sigaction mine = {}, before;
  mine.sa_handler = look_at_copy;
  CHECK_EQ(::sigaction(SIGSEGV, &mine, &before), 0);
  const std::vector<uint8_t> data = pattern(600, 1);
  for (size_t ahead = 2; ahead < 300; ahead += 7) {
    for (size_t shift = 0; shift < 8; ++shift) {
      watched.from = reinterpret_cast<const char*>(data.data()) + shift;
      watched.to = watched.memory + Watched::kPage - ahead;
      watched.stopped = watched.in_order = false;
      std::memset(watched.memory, 0, 2 * Watched::kPage);
      CHECK_EQ(::mprotect(watched.memory + Watched::kPage, Watched::kPage, PROT_READ), 0);
      copy_in_order(watched.to, watched.from, 2 * ahead - 1);
      EXPECT(std::memcmp(watched.to, watched.from, 2 * ahead - 1) == 0);
      EXPECT(watched.stopped && watched.in_order);
    }
  }
  CHECK_EQ(::sigaction(SIGSEGV, &before, nullptr), 0);
  CHECK_EQ(::munmap(watched.memory, 2 * Watched::kPage), 0);
}

TEST(sizes_are_parsed) {
  uint64_t value = 0;
  CHECK(parse_bytes("64K", &value));
  EXPECT_EQ(value, 65536u);
  CHECK(parse_bytes("2m", &value));
  EXPECT_EQ(value, 2u << 20);
  CHECK(parse_bytes("131072", &value));
  EXPECT_EQ(value, 131072u);
  for (const char* bad : {"", "K", "-1", "1.5M", "64KB", "64 K", "99999999999999999999", "9999999999999G"}) {
    EXPECT(!parse_bytes(bad, &value));
  }
}

TEST(bad_settings_are_told_and_replaced) {
  net();
  warnings();
  ::setenv("BAGUA_NET_CHUNK", "3", 1);
  ::setenv("BAGUA_NET_STREAMS", "many", 1);
  ::setenv("BAGUA_NET_STREAM", "2", 1);
  ::setenv("BAGUA_NET_THREADS", "3", 1);
  const Settings read = read_settings();
  for (const char* name : {"BAGUA_NET_CHUNK", "BAGUA_NET_STREAMS", "BAGUA_NET_STREAM", "BAGUA_NET_THREADS"}) {
    ::unsetenv(name);
  }
  const Settings standard = read_settings();
  EXPECT_EQ(read.chunk_bytes, standard.chunk_bytes);
  EXPECT_EQ(read.streams, standard.streams);
  EXPECT_EQ(read.threads, 3);
  std::string all;
  for (const std::string& line : warnings()) all += line + "\n";
  EXPECT(all.find("BAGUA_NET_CHUNK='3' can't be used: it must be a size from 16K to 64M") != all.npos);
  EXPECT(all.find("BAGUA_NET_STREAMS='many' can't be used: it must be a number from 1 to 32") != all.npos);
  EXPECT(all.find("there is no setting BAGUA_NET_STREAM:") != all.npos);
}

TEST(a_link_local_address_needs_an_interface_of_its_kind) {
  Handle handle{};
  handle.magic = Handle::kMagic;
  handle.version = kProtocolVersion;
  handle.family = 6;
  handle.port = 1;
  handle.link_local = 1;
  handle.address[0] = 0xfe;
  handle.address[1] = 0x80;
  Address out;
  Device device{"eth0", "", interface("eth0", "10.0.0.5").address, 1};
  EXPECT(!handle_address(handle, device, &out));
  device.address = interface("eth0", "fe80::1").address;
  device.address.v6.sin6_scope_id = 7;
  CHECK_OK(handle_address(handle, device, &out));
  EXPECT_EQ(out.v6.sin6_scope_id, 7u);
}

TEST(properties_say_the_same_in_both_versions) {
  PropertiesV8 v8{};
  PropertiesV11 v11{};
  CHECK_EQ(net().get_properties(0, &v11), kSuccess);
  CHECK_EQ(ncclNetPlugin_v8.get_properties(0, &v8), kSuccess);
  EXPECT_EQ(std::string(v8.name), "lo");
  EXPECT_EQ(std::string(v11.name), "lo");
  EXPECT_EQ(v8.speed, v11.speed);
  EXPECT_EQ(v8.max_comms, v11.max_comms);
  for (const int recvs : {v8.max_recvs, v11.max_recvs}) EXPECT_EQ(recvs, 1);
  EXPECT_EQ(net().get_properties(1000, &v11), kInvalidArgument);
  EXPECT_EQ(net().get_properties(-1, &v11), kInvalidArgument);
}

TEST(wrong_use_is_refused) {
  Pair pair = connected();
  void* request = nullptr;
  void* mhandle = nullptr;
  char byte;
  void* data[2] = {&byte, &byte};
  size_t sizes[2] = {1, 1};
  int tags[2] = {0, 0};
  EXPECT_EQ(net().irecv(pair.receiver, 2, data, sizes, tags, nullptr, nullptr, &request), kInvalidUsage);
  EXPECT_EQ(net().isend(pair.sender, nullptr, 1, 0, nullptr, nullptr, &request), kInvalidArgument);
  EXPECT_EQ(ncclNetPlugin_v8.isend(pair.sender, &byte, -1, 0, nullptr, &request), kInvalidArgument);
  EXPECT_EQ(net().reg_mr(pair.sender, &byte, 1, kPtrCuda, &mhandle), kInvalidUsage);
  EXPECT_EQ(net().reg_mr(pair.sender, &byte, 1, kPtrHost, &mhandle), kSuccess);
  EXPECT_EQ(net().dereg_mr(pair.sender, mhandle), kSuccess);
  EXPECT_EQ(net().isend(nullptr, &byte, 1, 0, nullptr, nullptr, &request), kInvalidArgument);
  EXPECT(request == nullptr);
  close(&pair);
}

}  // namespace
}  // namespace bagua::nccl_net::rig
