#include "nccl_net/devices.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>

#include "base/text.h"
#include "nccl_net/log.h"
#include "net/socket.h"

namespace bagua::nccl_net {
namespace {

constexpr size_t kMaxDevices = 16;  // the same limit as for NCCL's own sockets
constexpr int kDefaultSpeed = 10000;

struct FreeInterfaces {
  void operator()(ifaddrs* list) const { ::freeifaddrs(list); }
};

struct NameFilter {
  bool exclude = false;
  bool exact = false;
  std::vector<std::string> names;

  explicit NameFilter(const std::string& text) {
    size_t at = 0;
    if (at < text.size() && text[at] == '^') exclude = true, ++at;
    if (at < text.size() && text[at] == '=') exact = true, ++at;
    while (at < text.size()) {
      const size_t comma = std::min(text.find(',', at), text.size());
      std::string name = text.substr(at, comma - at);
      name = name.substr(0, name.find(':'));  // NCCL's lists may name a port, which is irrelevant for sockets
      if (!name.empty()) names.push_back(std::move(name));
      at = comma + 1;
    }
  }
  bool takes(const std::string& name) const {
    const bool named = std::any_of(names.begin(), names.end(), [&](const std::string& item) {
      return exact ? name == item : name.compare(0, item.size(), item) == 0;
    });
    return named != exclude;
  }
};

// Rank of an address, 0 is best. Any other address is better than a link-local one, which reaches only the same link.
int rank(const Interface& item) {
  if (item.address.any.sa_family == AF_INET) return 0;
  return IN6_IS_ADDR_LINKLOCAL(&item.address.v6.sin6_addr) ? 2 : 1;
}

std::vector<Interface> matching(const std::vector<Interface>& found, const std::string& names, int family) {
  const NameFilter filter(names);
  std::vector<Interface> out;
  for (const Interface& item : found) {
    if (family != AF_UNSPEC && item.address.any.sa_family != family) continue;
    if (!filter.takes(item.name)) continue;
    const auto same =
        std::find_if(out.begin(), out.end(), [&](const Interface& other) { return other.name == item.name; });
    if (same == out.end()) {
      if (out.size() < kMaxDevices) out.push_back(item);
    } else if (rank(item) < rank(*same)) {
      *same = item;
    }
  }
  return out;
}

std::vector<Interface> read_interfaces() {
  ifaddrs* list = nullptr;
  std::vector<Interface> out;
  if (::getifaddrs(&list) != 0) {
    BAGUA_NET_WARN("can't list the network interfaces: " + errno_text(errno));
    return out;
  }
  const std::unique_ptr<ifaddrs, FreeInterfaces> owner(list);
  for (const ifaddrs* item = list; item != nullptr; item = item->ifa_next) {
    if (item->ifa_addr == nullptr || (item->ifa_flags & IFF_RUNNING) == 0)
      continue;  // IFF_RUNNING, because a card without a cable is "up"
    const int family = item->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    Interface one{item->ifa_name, {}, (item->ifa_flags & IFF_LOOPBACK) != 0};
    std::memset(&one.address, 0, sizeof one.address);
    std::memcpy(&one.address, item->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    out.push_back(std::move(one));
  }
  return out;
}

// Path of an interface's device in /sys; "" if it has none. It need not be a PCI function (".../0000:00:03.0/virtio0"):
// NCCL attaches such a device to the first processor, as it does for its own sockets.
std::string pci_path_of(const std::string& name) {
  char resolved[PATH_MAX];
  if (::realpath(("/sys/class/net/" + name + "/device").c_str(), resolved) == nullptr) return "";
  return resolved;
}

int speed_of(const std::string& name) {
  std::ifstream file("/sys/class/net/" + name + "/speed");
  int speed = 0;
  return file >> speed && speed > 0 ? speed : kDefaultSpeed;  // Wi-Fi, loopback and tunnels have no speed
}

int family_of_environment() {
  const char* text = std::getenv("NCCL_SOCKET_FAMILY");
  if (text == nullptr || *text == '\0') return AF_UNSPEC;
  if (std::strcmp(text, "AF_INET") == 0) return AF_INET;
  if (std::strcmp(text, "AF_INET6") == 0) return AF_INET6;
  BAGUA_NET_WARN(std::string("NCCL_SOCKET_FAMILY='") + text +
                 "' can't be used: it must be AF_INET or AF_INET6; both are used");
  return AF_UNSPEC;
}

void warn_of_none(const std::vector<Interface>& found, const std::string& names, int family) {
  std::string all;
  for (const Interface& item : found) {
    const std::string shown = address_text(item.address);
    all += (all.empty() ? "" : ", ") + item.name + " (" + shown.substr(0, shown.rfind(':')) + ")";
  }
  BAGUA_NET_WARN("no network interface can be used: NCCL_SOCKET_IFNAME is '" + names + "', NCCL_SOCKET_FAMILY allows " +
                 (family == AF_INET    ? "IPv4"
                  : family == AF_INET6 ? "IPv6"
                                       : "both") +
                 "; the interfaces that are up are " + (all.empty() ? "none" : all));
}

}  // namespace

socklen_t address_bytes(const Address& address) {
  return address.any.sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

std::string address_text(const Address& address) {
  return bagua::address_text(&address.any, address_bytes(address));
}

std::vector<Interface> choose_interfaces(const std::vector<Interface>& found, const std::string& names, int family) {
  if (!names.empty()) return matching(found, names, family);
  std::vector<Interface> others;
  std::vector<Interface> loopback;
  for (const Interface& item : found) (item.loopback ? loopback : others).push_back(item);
  // The same order as for NCCL's own sockets. Bridges of virtual machines come late: they have the same address on all
  // hosts.
  for (const char* standard : {"ib", "^docker,virbr", "docker"}) {
    std::vector<Interface> out = matching(others, standard, family);
    if (!out.empty()) return out;
  }
  std::vector<Interface> out = matching(loopback, "^", family);
  return out.empty() ? matching(others, "virbr", family) : out;
}

std::vector<Device> find_devices() {
  const char* names = std::getenv("NCCL_SOCKET_IFNAME");
  const int family = family_of_environment();
  const std::vector<Interface> found = read_interfaces();
  std::vector<Device> out;
  for (const Interface& item : choose_interfaces(found, names != nullptr ? names : "", family)) {
    out.push_back({item.name, pci_path_of(item.name), item.address, speed_of(item.name)});
  }
  if (out.empty()) warn_of_none(found, names != nullptr ? names : "", family);
  return out;
}

}  // namespace bagua::nccl_net
