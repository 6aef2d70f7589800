"""Where things lie in a build of NCCL, as a header for real_nccl: read off the debugging information that NVIDIA leaves
in its libraries. Needs gdb; VERSION is what ncclGetVersion says:

    gdb -batch -x read_layout.py libnccl.so.2 > layout_VERSION.h; clang-format -i layout_VERSION.h
"""

import gdb

ABSENT = "kAbsent"
# Namespace, NCCL's struct, fields as (type here, names there: the first that exists).
WANTED = [
    (
        "comm",
        "ncclComm",
        [
            ("const char**", "ncclNet"),
            ("void*", "netContext"),
            ("uint64_t", "commHash"),
            ("const char*", "config.netName"),
            ("int", "config.trafficClass"),
        ],
    ),
    (
        "proxy_state",
        "ncclProxyState",
        [
            *(
                ("int", name)
                for name in ("refCount", "tpRank", "tpnRanks", "tpLocalnRanks", "p2pnChannels", "nChannels")
            ),
            ("int", "buffSizes"),
            ("const char**", "ncclNet"),
            ("uint32_t*", "abortFlag"),
            ("void*", "netContext"),
            ("int", "netAttr"),
        ],
    ),
    (
        "connection",
        "ncclProxyConnection",
        [*(("int", name) for name in ("send", "transport", "sameProcess", "state")), ("void*", "transportResources")],
    ),
    (
        "args",
        "ncclProxyArgs",
        [
            *(("int", name) for name in ("nsubs", "sliceSteps", "chunkSteps", "state", "nChannels", "nPeers", "idle")),
            *(("uint8_t", name) for name in ("collAPI coll", "protocol", "algorithm")),
        ],
    ),
    (
        "sub",
        "ncclProxySubArgs",
        [
            ("void*", "connection"),
            *(("int", name) for name in ("channelId", "nsteps", "groupSize")),
            ("int64_t", "nbytes"),
            *(("uint64_t", name) for name in ("posted", "received")),
        ],
    ),
    *(
        (
            kind,
            f"{kind}NetResources",
            [("void*", "sendMem"), ("void*", "recvMem"), ("char*", "buffers"), ("", "buffSizes")],
        )
        for kind in ("send", "recv")
    ),
    ("fifo", "ncclRecvMem", [("int64_t", "connFifo")]),
]
SIZES = {"kSetupReq": "setupReq", "kSendConnect": "netSendConnectArgs", "kRecvConnect": "netRecvConnectArgs"}
SIZES |= {"kConnectMap": "connectMap", "kConnFifo": "ncclConnFifo"}


def struct(name):
    """A struct of NCCL's by its name, as its network transport knows it: coll_net.cc has others of the same names."""
    return gdb.parse_and_eval(f"(struct {name}*)0").type.target().strip_typedefs()


def place(kind, path):
    """Offset and type of a field ("config.netName"), also one of a struct without name; None."""
    first, _, rest = path.partition(".")
    for field in kind.strip_typedefs().fields():
        if not field.name:
            found = place(field.type, path)
        elif field.name != first:
            continue
        else:
            found = place(field.type, rest) if rest else (0, field.type.strip_typedefs())
        if found:
            return field.bitpos // 8 + found[0], found[1]
    return None


def element_size(kind):
    """Bytes of an element of an array."""
    return kind.target().sizeof if kind.code == gdb.TYPE_CODE_ARRAY else kind.sizeof


gdb.execute("list 'transport/net.cc':600", to_string=True)
print('// By read_layout.py; included by layout.h.\n#pragma once\n\n#include "nccl_net/real_nccl/field.h"\n')
print("namespace bagua::nccl_net::real {\n")
for name, of in SIZES.items():
    print(f"constexpr size_t {name}Size = {struct(of).sizeof};")
for namespace, of, fields in WANTED:
    print(f"\nnamespace {namespace} {{  // struct {of}\nconstexpr size_t kSize = {struct(of).sizeof};")
    for kind, names in fields:
        found = next(filter(None, (place(struct(of), name) for name in names.split())), None)
        wide = {4: "int", 8: "int64_t"}[element_size(found[1])] if not kind else kind
        plain = names.split()[0].rpartition(".")[2]
        stride = f", {struct(of).sizeof}" if namespace == "sub" else ""
        print(f"constexpr Field<{wide}> {plain}{{{found[0] if found else ABSENT}{stride}}};")
    print(f"}}  // namespace {namespace}")
print(f"\nconstexpr size_t kSizeInConnFifo = {place(struct('ncclConnFifo'), 'size')[0]};  // ncclConnFifo.size")
print("\n}  // namespace bagua::nccl_net::real")
