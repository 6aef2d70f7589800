#include "channel/layout.h"

namespace bagua {

namespace {

struct Names {
  const char* name;
  const char* title;
};

constexpr Names kNames[kKinds] = {
    {"barrier", "barrier"},
    {"allreduce", "all-reduce"},
    {"broadcast", "broadcast"},
    {"reduce", "reduce"},
    {"allgather", "all-gather"},
    {"reduce_scatter", "reduce-scatter"},
    {"gather", "gather"},
    {"scatter", "scatter"},
    {"alltoall", "all-to-all"},
    {"send", "send"},
    {"recv", "recv"},
    {"move_residuals", "move of residuals"},
};

}  // namespace

const char* kind_name(Kind kind) {
  return kNames[static_cast<int>(kind)].name;
}

const char* kind_title(Kind kind) {
  return kNames[static_cast<int>(kind)].title;
}

bool kind_known(uint8_t kind) {
  return kind < kKinds;
}

bool kind_reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}

bool kind_rooted(Kind kind) {
  return kind == Kind::kReduce || kind == Kind::kBroadcast || kind == Kind::kGather || kind == Kind::kScatter ||
         kind == Kind::kSend || kind == Kind::kRecv;
}

bool op_known(uint8_t op) {
  return op <= 3 || (op >= 7 && op <= 10);
}

}  // namespace bagua
