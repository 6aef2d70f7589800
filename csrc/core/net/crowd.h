// Whom a listener drops when it has no more room for connections that have not shown who they are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace bagua {

// The host of an address as accept_tcp() writes it.
inline std::string_view host_part(const std::string& address) {
  return std::string_view(address).substr(0, address.rfind(':'));
}

// Index of the oldest connection of the host that has most of them: whoever comes alone is not crowded out. `all`
// begins with the oldest, and is not empty. Each of them has a `peer`.
template <class Connection>
size_t crowding(const std::vector<Connection>& all) {
  std::map<std::string_view, size_t> counts;
  for (const Connection& one : all) ++counts[host_part(one.peer)];
  const auto most =
      std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const Connection& one) { return host_part(one.peer) == most->first; });
  return static_cast<size_t>(found - all.begin());
}

}  // namespace bagua
