// Searches all histories of small elastic jobs: members that train for two steps, losses at every point, changes that
// are planned at every point, and messages of the coordinator that come late, twice, in another order, or never. Each
// host has the engine's own Succession; members, hosts and the coordinator are models of what surrounds it.
#include "engine/job/succession.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "harness.h"

namespace bagua {

// Equal for objects that answer alike.
struct SuccessionKey {
  std::string text;

  explicit SuccessionKey(const Succession& of) {
    for (const auto* group : {&of.present_, &of.lobby_}) {
      append(group->generation);
      append(group->members);
      append(uint64_t{group->lobby} << 1 | uint64_t{group->lost});
    }
    append(of.dismissed_by_);
    append(of.plan_ ? of.plan_->next.generation : 0);
    if (of.plan_) {
      append(std::set<int>(of.plan_->next.members.begin(), of.plan_->next.members.end()));
      append(uint64_t{of.plan_->here} << 1 | uint64_t{of.plan_->hold});
    }
    for (const auto* members : {&of.here_, &of.waiting_, &of.unsettled_, &of.ready_, &of.dismissed_, &of.left_}) {
      append(*members);
    }
  }
  void append(uint64_t value) { text.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void append(const std::set<int>& members) {
    append(members.size());
    for (const int member : members) append(static_cast<uint64_t>(member));
  }
};

namespace {

std::string key_of(const Succession& succession) {
  return SuccessionKey(succession).text;
}

constexpr int kMostUnits = 2;  // training steps; then each is ready for the end, which never comes

enum class At : char { kLobby, kExchange, kWork, kReady, kEnter, kDead, kOut };

struct Member {
  int number, host;
  At at = At::kWork;
  uint64_t generation = 1;
  bool has_state = true;
  int committed = 0;
  uint64_t ready_in[kMostUnits + 1] = {};  // by unit: the last generation in which it was ready
  uint64_t seen[kMostUnits + 1] = {};      // by unit: the newest planned generation that it knew of then
  uint64_t done_in[kMostUnits] = {};       // by unit: the generation whose result it has committed; 0: none yet
  uint64_t told_in = 1;                    // the last generation in which it said how far it is
  int told = 0;

  bool alive() const { return at != At::kDead && at != At::kOut; }
};

struct Host {
  Succession succession;
  uint64_t generation = 1;  // that runs here
  bool over = false;        // the present generation
  bool lost = false;        // since it lost somebody
  uint64_t planned = 0;
  bool cut_off = false;  // the coordinator's stream has broken, with orders on it
};

// The coordinator's wish, told to every host.
struct Order {
  uint64_t generation = 1;
  std::vector<int> members;
  bool planned = false, hold = false;
};

struct Scenario {
  std::vector<Member> members;  // of generation 1, and newcomers
  std::vector<int> wanted;      // members after the planned change; none: nothing is planned
  bool hold = false;            // it is a pause, and the same members go on
  int faults = 0;               // at most
  std::vector<int> lobby = {};  // newcomers on host 0
  int units = kMostUnits;       // training steps
};

struct World {
  std::vector<Member> members;
  std::vector<Host> hosts;
  std::vector<Order> orders;                   // by number of the generation - 1
  std::vector<std::vector<uint64_t>> pending;  // by host: orders that have not come, or come once more
  int losses = 0;
  int faults = 0;  // losses, messages that come twice or never, connections that end without the reason
  bool changed = false, repeated = false;
};

Membership membership_of(const World& world, const Order& order, int host) {
  Membership made;
  made.generation = order.generation;
  made.host_index = -1;
  std::map<int, std::vector<int>> by_host;
  for (const int number : order.members) {
    by_host[world.members[static_cast<size_t>(number)].host].push_back(static_cast<int>(made.members.size()));
    made.members.push_back(number);
  }
  for (const auto& [index, ranks] : by_host) {
    if (index == host) made.host_index = static_cast<int>(made.hosts.size());
    made.hosts.push_back(ranks);
  }
  return made;
}

bool is_in(const std::vector<int>& members, int number) {
  return std::find(members.begin(), members.end(), number) != members.end();
}

class Search {
 public:
  explicit Search(const Scenario& scenario) : scenario_(scenario) {
    World world;
    world.members = scenario.members;
    Order first;
    int hosts = 0;
    for (const Member& member : world.members) {
      hosts = std::max(hosts, member.host + 1);
      if (member.at != At::kLobby) first.members.push_back(member.number);
    }
    world.orders.push_back(first);
    world.pending.resize(static_cast<size_t>(hosts));
    for (int h = 0; h < hosts; ++h) {
      Membership here = membership_of(world, first, h);
      if (here.host_index < 0) {  // a host of newcomers alone
        here = {1, 0, {{}}, {}, true};
        for (const Member& member : world.members) {
          if (member.host != h) continue;
          here.hosts[0].push_back(static_cast<int>(here.members.size()));
          here.members.push_back(member.number);
        }
      }
      world.hosts.push_back({Succession(here)});
      if (h == 0 && !scenario.lobby.empty()) world.hosts.back().succession.open_lobby(scenario.lobby);
      for (const Member& member : world.members) {
        if (member.host == h) world.hosts.back().succession.joined(member.number);
      }
    }
    visit(std::move(world));
    while (!left_.empty() && problems_ == 0) {
      const World next = std::move(left_.back());
      left_.pop_back();
      expand(next);
    }
  }

  size_t states() const { return known_.size(); }
  size_t ends() const { return ends_; }
  bool repeated() const { return repeated_; }

 private:
  using Change = std::function<void(World*)>;

  void visit(World world) {
    forget(&world);
    std::string key;
    const auto add = [&key](uint64_t value) { key += static_cast<char>(value); };
    for (const Member& m : world.members) {
      for (const uint64_t value : {static_cast<uint64_t>(m.at), m.generation, uint64_t{m.has_state}, m.told_in})
        add(value);
      add(static_cast<uint64_t>(m.committed));
      add(static_cast<uint64_t>(m.told));
      for (int unit = 0; unit <= scenario_.units; ++unit) {
        add(m.ready_in[unit]);
        add(m.seen[unit]);
        if (unit < scenario_.units) add(m.done_in[unit]);
      }
    }
    for (const Host& host : world.hosts) {
      key += key_of(host.succession);
      add(host.generation);
      add(uint64_t{host.cut_off} << 2 | uint64_t{host.over} << 1 | uint64_t{host.lost});
      add(host.planned);
    }
    for (const auto& there : world.pending) {
      add(there.size());
      for (const uint64_t number : there) add(number);
    }
    for (const Order& order : world.orders) {
      add(order.members.size());
      for (const int number : order.members) add(static_cast<uint64_t>(number));
    }
    add(uint64_t{world.losses > 0} << 2 | uint64_t{world.changed} << 1 | uint64_t{world.repeated});
    add(static_cast<uint64_t>(world.faults));
    if (known_.insert(std::move(key)).second) left_.push_back(std::move(world));
  }

  // Nobody will look at these any more: fewer states.
  void forget(World* world) const {
    for (int unit = 0; unit <= scenario_.units; ++unit) {
      const bool needed = std::any_of(world->members.begin(), world->members.end(),
                                      [unit](const Member& m) { return m.alive() && m.committed == unit; });
      for (Member& member : world->members) {
        if (!needed) member.ready_in[unit] = member.seen[unit] = 0;
      }
    }
    for (Member& member : world->members) {
      if (member.at == At::kDead || member.at == At::kOut) member.generation = member.has_state = 0;
    }
  }

  void expect(bool holds, const char* what, const World& world) {
    if (holds || problems_++ > 0) return;
    std::string text = what;
    for (const Member& m : world.members) {
      text += "\n  member " + std::to_string(m.number) + " at " + std::to_string(static_cast<int>(m.at)) + " in " +
              std::to_string(m.generation) + ", committed " + std::to_string(m.committed);
    }
    for (const Host& host : world.hosts) text += "\n  host " + key_of(host.succession) + (host.over ? " over" : "");
    for (const Order& order : world.orders) {
      text += "\n  order " + std::to_string(order.generation) + (order.planned ? " planned" : "") + " of";
      for (const int number : order.members) text += " " + std::to_string(number);
    }
    test::note_failure(__FILE__, __LINE__, text);
  }

  // Everything that may happen next.
  void expand(const World& world) {
    const bool faults_left = world.faults < scenario_.faults;
    bool moves = false;  // something that must happen at last
    const auto may = [&](const Change& change) {
      World next = world;
      change(&next);
      visit(std::move(next));
    };
    const auto must = [&](const Change& change) {
      moves = true;
      may(change);
    };
    for (size_t m = 0; m < world.members.size(); ++m) step(world, m, must);
    for (size_t h = 0; h < world.hosts.size(); ++h) {
      const Host& host = world.hosts[h];
      if (host.succession.due() != nullptr) must([h](World* w) { carry_out(w, h); });
      if (!host.over) {
        const auto [ended, lost] = elsewhere_over(world, h);
        // A connection that ends looks like a loss to whoever does not hear the reason.
        if (ended && !lost) must([h](World* w) { w->hosts[h].over = true; });
        if (ended && lost) must([h](World* w) { w->hosts[h].over = w->hosts[h].lost = true; });
        if (ended && !lost && faults_left) {
          may([h](World* w) {
            ++w->faults;
            w->hosts[h].over = w->hosts[h].lost = true;
          });
        }
      }
      for (size_t i = 0; i < world.pending[h].size(); ++i) {
        must([this, h, i](World* w) {
          const uint64_t number = w->pending[h][i];
          w->pending[h].erase(w->pending[h].begin() + static_cast<std::ptrdiff_t>(i));
          deliver(w, h, number);
        });
        if (!faults_left) continue;
        may([this, h, i](World* w) {  // and will come once more
          ++w->faults;
          deliver(w, h, w->pending[h][i]);
        });
        may([h, i](World* w) {  // lost with its stream, and maybe all that followed on it
          ++w->faults;
          w->pending[h].erase(w->pending[h].begin() + static_cast<std::ptrdiff_t>(i));
          w->hosts[h].cut_off = true;
        });
      }
      // The next stream begins with the newest order. Those before it that were lost never come.
      if (host.cut_off) {
        must([h](World* w) {
          w->hosts[h].cut_off = false;
          w->pending[h].push_back(w->orders.size());
        });
      }
    }
    if (lost_somebody(world) || stuck(world)) must([this](World* w) { react(w); });
    if (world.orders.back().hold && !lost_somebody(world) && !stuck(world)) must([this](World* w) { resume(w); });
    if (may_plan(world)) may([this](World* w) { plan(w); });
    if (faults_left) {
      for (size_t m = 0; m < world.members.size(); ++m) {
        if (world.members[m].alive()) may([m](World* w) { lose(w, m); });
      }
    }
    if (!moves) check_end(world);
  }

  template <class Must>
  void step(const World& world, size_t m, const Must& must) {
    const Member& member = world.members[m];
    const Host& host = world.hosts[static_cast<size_t>(member.host)];
    const bool over = host.over || host.generation != member.generation;
    const bool training = member.at == At::kWork || member.at == At::kReady || member.at == At::kExchange;
    if (training && over) must([m](World* w) { w->members[m].at = At::kEnter; });
    switch (member.at) {
      case At::kLobby:
        must([m](World* w) { w->members[m].at = At::kEnter; });
        break;
      case At::kWork:
        if (!over) must([this, m](World* w) { get_ready(w, m); });
        break;
      case At::kReady:
        if (!over && everybody_ready(world, member)) must([this, m](World* w) { commit_with_all(w, m); });
        break;
      case At::kExchange:
        if (!over && everybody_told(world, member)) must([this, m](World* w) { hear(w, m); });
        break;
      case At::kEnter: {
        Succession next = host.succession;  // where nothing changes nothing happens
        const auto answer = next.enter(member.number, member.generation, host.lost);
        const bool waits = answer == Succession::Answer::kWait || answer == Succession::Answer::kReady;
        if (!waits || key_of(next) != key_of(host.succession)) must([this, m](World* w) { ask(w, m); });
        break;
      }
      default:
        break;
    }
  }

  const std::vector<int>& members_of(const World& world, uint64_t generation) const {
    return world.orders[generation - 1].members;
  }

  void get_ready(World* world, size_t m) {
    Member& member = world->members[m];
    const int unit = member.committed;
    if (member.ready_in[unit] != 0 && unit < scenario_.units) world->repeated = true;
    member.ready_in[unit] = member.generation;
    member.seen[unit] = world->hosts[static_cast<size_t>(member.host)].planned;
    member.at = At::kReady;
  }

  bool everybody_ready(const World& world, const Member& member) const {
    if (member.committed == scenario_.units) {  // for ever, but for what is planned
      uint64_t newest = 0;
      for (const int number : members_of(world, member.generation)) {
        newest = std::max(newest, world.members[static_cast<size_t>(number)].seen[scenario_.units]);
      }
      if (newest <= member.generation) return false;
    }
    const auto& all = members_of(world, member.generation);
    return std::all_of(all.begin(), all.end(), [&](int number) {
      return world.members[static_cast<size_t>(number)].ready_in[member.committed] == member.generation;
    });
  }

  void commit(World* world, Member* member) {
    const int unit = member->committed;
    if (unit == scenario_.units) return;
    member->done_in[unit] = member->ready_in[unit];
    ++member->committed;
    // A unit that the dead alone have committed is as if it had never been, and so it is for those that leave as
    // planned.
    const auto& newest = world->orders.back().members;
    for (const Member& other : world->members) {
      if (!other.alive() || !is_in(newest, other.number) || !is_in(newest, member->number)) continue;
      const bool differs = other.committed > unit && other.done_in[unit] != member->done_in[unit];
      expect(!differs, "a unit is committed with two results", *world);
    }
  }

  void commit_with_all(World* world, size_t m) {
    Member& member = world->members[m];
    uint64_t newest = 0;
    for (const int number : members_of(*world, member.generation)) {
      newest = std::max(newest, world->members[static_cast<size_t>(number)].seen[member.committed]);
    }
    commit(world, &member);
    member.at = newest > member.generation ? At::kEnter : At::kWork;
  }

  void ask(World* world, size_t m) {
    Member& member = world->members[m];
    Host& host = world->hosts[static_cast<size_t>(member.host)];
    switch (host.succession.enter(member.number, member.generation, host.lost)) {
      case Succession::Answer::kEnter:
        expect(is_in(members_of(*world, host.generation), member.number), "entered as a stranger", *world);
        member.generation = member.told_in = host.generation;
        member.told = member.has_state ? member.committed : -1;
        member.at = At::kExchange;
        break;
      case Succession::Answer::kDismissed:
        expect(!is_in(world->orders.back().members, member.number), "dismissed although it is needed", *world);
        member.at = At::kOut;
        host.succession.gone(member.number, false);
        break;
      case Succession::Answer::kLeftOut:
      case Succession::Answer::kUnready:
        expect(!is_in(world->orders.back().members, member.number), "left out although it is needed", *world);
        expect(world->losses > 0 || !is_in(world->orders[0].members, member.number), "left out without a loss", *world);
        member.at = At::kOut;
        host.succession.gone(member.number, true);
        break;
      case Succession::Answer::kWait:
      case Succession::Answer::kReady:
        break;
    }
  }

  bool everybody_told(const World& world, const Member& member) const {
    const auto& all = members_of(world, member.generation);
    return std::all_of(all.begin(), all.end(), [&](int number) {
      return world.members[static_cast<size_t>(number)].told_in == member.generation;
    });
  }

  // All members of the generation have said how far they are.
  void hear(World* world, size_t m) {
    Member& member = world->members[m];
    int newest = -1;
    for (const int number : members_of(*world, member.generation)) {
      newest = std::max(newest, world->members[static_cast<size_t>(number)].told);
    }
    expect(newest >= 0, "a generation without state", *world);
    if (!member.has_state) {
      for (const Member& other : world->members) {
        if (other.told_in != member.generation || other.told < newest) continue;
        std::copy(std::begin(other.done_in), std::end(other.done_in), member.done_in);
      }
      member.committed = newest;
      member.has_state = true;
    } else if (newest > member.committed) {
      expect(newest == member.committed + 1, "a member is two units behind", *world);
      commit(world, &member);
    }
    member.at = At::kWork;
  }

  static void lose(World* world, size_t m) {
    Member& member = world->members[m];
    Host& host = world->hosts[static_cast<size_t>(member.host)];
    ++world->losses;
    ++world->faults;
    member.at = At::kDead;
    host.succession.gone(member.number, true);
    // As Engine::note_gone: the present generation can't go on without it.
    const bool needed = !host.succession.dismissed(member.number);
    if (needed && is_in(world->orders[host.generation - 1].members, member.number)) host.over = host.lost = true;
  }

  // Another host of this generation has ended it.
  std::pair<bool, bool> elsewhere_over(const World& world, size_t h) const {
    bool ended = false, lost = false;
    const uint64_t here = world.hosts[h].generation;
    for (const int number : members_of(world, here)) {
      const Host& other = world.hosts[static_cast<size_t>(world.members[static_cast<size_t>(number)].host)];
      ended = ended || other.generation > here || (other.generation == here && other.over);
      lost = lost || (other.generation == here && other.lost);
    }
    return {ended, lost};
  }

  // A generation was lost by nobody's death, and its members wait with what they may have to repeat.
  bool stuck(const World& world) const {
    for (size_t h = 0; h < world.hosts.size(); ++h) {
      const Host& host = world.hosts[h];
      if (!host.lost || host.succession.due() != nullptr || !world.pending[h].empty() || host.cut_off) continue;
      if (world.orders.back().generation > host.generation && !world.orders.back().planned) continue;
      for (const Member& member : world.members) {
        const bool mine = static_cast<size_t>(member.host) == h && member.generation == host.generation;
        if (mine && member.at == At::kEnter && is_in(world.orders.back().members, member.number)) return true;
      }
    }
    return false;
  }

  static void begin(World* world, size_t h, const Membership& next) {
    Host& host = world->hosts[h];
    host.succession.begin(next);
    host.generation = next.generation;
    host.over = host.lost = false;
    for (const Member& member : world->members) {
      const bool lost = !member.alive() && static_cast<size_t>(member.host) == h;
      if (lost && next.rank_of(member.number) >= 0) host.over = host.lost = true;
    }
  }

  static void carry_out(World* world, size_t h) {
    const Plan plan = *world->hosts[h].succession.due();
    if (plan.here) return begin(world, h, plan.next);
    world->hosts[h].succession.dismiss();
  }

  void deliver(World* world, size_t h, uint64_t number) {
    const Order& order = world->orders[number - 1];
    Host& host = world->hosts[h];
    const Membership next = membership_of(*world, order, static_cast<int>(h));
    if (order.planned) {
      const Plan plan{next, {}, next.host_index >= 0, order.hold};
      if (host.succession.plan(plan)) host.planned = number;
      return;
    }
    if (next.host_index < 0) {  // whoever is still here is stopped
      for (Member& member : world->members) {
        if (static_cast<size_t>(member.host) == h && member.alive()) member.at = At::kOut;
      }
      return;
    }
    if (!host.succession.check_next(number)) {
      return expect(number <= host.succession.newest() || number < host.planned, "refused for no reason", *world);
    }
    begin(world, h, next);
  }

  bool lost_somebody(const World& world) const {
    const auto& all = world.orders.back().members;
    return std::any_of(all.begin(), all.end(),
                       [&](int number) { return !world.members[static_cast<size_t>(number)].alive(); }) &&
           somebody_has_state(world);
  }

  bool somebody_has_state(const World& world) const {
    const auto& all = world.orders.back().members;
    return std::any_of(all.begin(), all.end(), [&](int number) {
      const Member& member = world.members[static_cast<size_t>(number)];
      return member.alive() && member.has_state;
    });
  }

  void order(World* world, std::vector<int> members, bool planned, bool hold) {
    world->orders.push_back({world->orders.size() + 1, std::move(members), planned, hold});
    for (auto& there : world->pending) there.push_back(world->orders.size());
  }

  // Survivors go on; newcomers that have no state yet try another time.
  void react(World* world) {
    std::vector<int> left;
    for (const int number : world->orders.back().members) {
      const Member& member = world->members[static_cast<size_t>(number)];
      if (member.alive() && member.has_state) left.push_back(number);
    }
    order(world, left, false, false);
  }

  bool may_plan(const World& world) const {
    if (world.changed || scenario_.wanted.empty() || lost_somebody(world)) return false;
    return std::all_of(scenario_.wanted.begin(), scenario_.wanted.end(), [&](int number) {
      const Member& member = world.members[static_cast<size_t>(number)];
      return member.alive() && member.at != At::kLobby && (member.has_state || member.at == At::kEnter);
    });
  }

  void plan(World* world) {
    world->changed = true;
    order(world, scenario_.hold ? world->orders.back().members : scenario_.wanted, true, scenario_.hold);
  }

  void resume(World* world) { order(world, world->orders.back().members, true, false); }

  // All that are left are ready for the end, together. What was planned after that comes to nothing.
  void check_end(const World& world) {
    ++ends_;
    repeated_ = repeated_ || (world.faults == 0 && world.repeated);
    if (!somebody_has_state(world)) return;
    uint64_t reached = 0;
    for (const Member& member : world.members) {
      if (member.alive() && member.has_state) reached = std::max(reached, member.generation);
    }
    const auto& together = members_of(world, reached);
    for (size_t later = reached; later < world.orders.size(); ++later) {
      expect(world.orders[later].planned, "a generation that nobody is in", world);
    }
    for (const Member& member : world.members) {
      if (!member.alive()) continue;
      if (!is_in(together, member.number)) {  // a newcomer that comes too late
        expect(!member.has_state, "one that nobody wants goes on", world);
        continue;
      }
      const bool there = member.at == At::kReady && member.committed == scenario_.units;
      expect(there && member.generation == reached, "a job that hangs", world);
    }
  }

  const Scenario scenario_;
  std::unordered_set<std::string> known_;
  std::vector<World> left_;
  int problems_ = 0;
  size_t ends_ = 0;
  bool repeated_ = false;
};

Member newcomer(int number, int host) {
  Member made{number, host};
  made.at = At::kLobby;
  made.has_state = false;
  made.told = -1;
  return made;
}

void search(const Scenario& scenario) {
  const Search done(scenario);
  EXPECT(done.ends() > 0);
  EXPECT(!done.repeated());  // without a fault nothing is
}

// Two steps without a fault, and one with a fault; with --full two with a fault.
void search_both(Scenario scenario) {
  search(scenario);
  scenario.faults = 1;
  if (getenv("BAGUA_TEST_FULL") == nullptr) scenario.units = 1;
  search(scenario);
}

}  // namespace

TEST(losses) {
  search({{{0, 0}, {1, 0}, {2, 1}}, {}, false, 2, {}, 1});
  search({{{0, 0}, {1, 0}, {2, 1}}, {}, false, 1});
}

TEST(a_plan_comes_too_late_for_members_that_have_left) {
  const auto generation = [](uint64_t number, std::vector<int> members) {
    Membership made;
    made.generation = number;
    made.hosts.emplace_back(members.size());
    std::iota(made.hosts[0].begin(), made.hosts[0].end(), 0);
    made.members = std::move(members);
    return made;
  };
  Succession succession(generation(1, {0, 1}));
  succession.joined(0);
  succession.joined(1);
  succession.open_lobby({2});
  succession.joined(2);
  EXPECT(succession.enter(2, 1, false) == Succession::Answer::kReady);
  EXPECT_OK(succession.plan({generation(2, {0, 1, 2}), {}, true, false}));
  succession.gone(0, false);
  EXPECT(succession.due() == nullptr);
  succession.gone(1, false);
  EXPECT(succession.due() == nullptr);  // the newcomer waits until the job has ended
  EXPECT(succession.enter(2, 1, false) == Succession::Answer::kWait);
}

TEST(a_newcomer_on_a_host_of_the_job) {
  search_both({{{0, 0}, {1, 1}, newcomer(2, 0)}, {0, 1, 2}, false, 0, {2}});
}

TEST(a_newcomer_on_a_host_of_its_own) {
  search_both({{{0, 0}, {1, 0}, newcomer(2, 1)}, {0, 1, 2}});
}

TEST(one_leaves_as_planned) {
  search_both({{{0, 0}, {1, 0}, {2, 1}}, {0, 2}});
}

TEST(a_host_leaves_as_planned) {
  search_both({{{0, 0}, {1, 0}, {2, 1}}, {0, 1}});
}

TEST(a_pause) {
  search({{{0, 0}, {1, 0}, {2, 1}}, {0, 1, 2}, true, 0, {}, 1});
  search({{{0, 0}, {1, 1}}, {0, 1}, true, 1, {}, 1});
}

}  // namespace bagua
