// The network interfaces that NCCL may use through this plugin: one device each.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <vector>

namespace bagua::nccl_net {

// An IPv4 or IPv6 address with port and, for IPv6, the interface of a link-local address.
union Address {
  sockaddr any;
  sockaddr_in v4;
  sockaddr_in6 v6;
};
socklen_t address_bytes(const Address& address);
// "10.0.0.1:4711", "[fe80::1%eth0]:4711".
std::string address_text(const Address& address);

struct Device {
  std::string name;      // of the interface
  std::string pci_path;  // in /sys; "" for an interface without hardware
  Address address;       // port 0
  int speed;             // Mbit/s
};

// One address of an interface that is up.
struct Interface {
  std::string name;
  Address address;
  bool loopback;
};

// Which interfaces of `found` NCCL_SOCKET_IFNAME (`names`: prefixes with commas, "^" before all: not these, "=": exact
// names) and NCCL_SOCKET_FAMILY (AF_INET, AF_INET6, AF_UNSPEC) allow, one address each, in order. Without names: ib*,
// else all but loopback and docker*, else docker*, else loopback: what NCCL's own sockets take. Pure.
std::vector<Interface> choose_interfaces(const std::vector<Interface>& found, const std::string& names, int family);

// Reads the machine's interfaces and the environment; the reason is logged if none is left.
std::vector<Device> find_devices();

}  // namespace bagua::nccl_net
