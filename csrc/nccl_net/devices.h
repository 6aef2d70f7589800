// Finds the network interfaces that NCCL may use through this plugin; each is one device.
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
  std::string name;      // name of the interface
  std::string pci_path;  // in /sys; "" for an interface without hardware
  Address address;       // port 0
  int speed;             // Mbit/s
};

// An address of an interface that is up.
struct Interface {
  std::string name;
  Address address;
  bool loopback;
};

// Returns the interfaces of `found` that NCCL_SOCKET_IFNAME (`names`) and NCCL_SOCKET_FAMILY (AF_INET, AF_INET6,
// AF_UNSPEC) allow, in order, with one address each. `names` are prefixes with commas; a "^" before all excludes them,
// a "=" makes them exact names. Without names it chooses as NCCL's own sockets do: ib*, else all but loopback and
// docker*, else docker*, else loopback. Pure.
std::vector<Interface> choose_interfaces(const std::vector<Interface>& found, const std::string& names, int family);

// Reads the machine's interfaces and the environment. Logs the reason if no interface is left.
std::vector<Device> find_devices();

}  // namespace bagua::nccl_net
