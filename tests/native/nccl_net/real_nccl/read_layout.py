"""Where things lie in a build of NCCL, for the columns of layout.h: read off the debugging information that NVIDIA
leaves in its libraries. Needs gdb: ``gdb -batch -x read_layout.py libnccl.so.2``
"""

import gdb

# NCCL's structs, and their fields (with a slash: names of other versions).
WANTED = {
    "setupReq": "",
    "netSendConnectArgs": "",
    "netRecvConnectArgs": "",
    "connectMap": "",
    "ncclConnFifo": "size",
    "ncclComm": "ncclNet netContext commHash config.netName config.trafficClass",
    "ncclProxyState": "refCount tpRank tpnRanks tpLocalnRanks p2pnChannels nChannels buffSizes ncclNet abortFlag "
    "netContext netAttr",
    "ncclProxyConnection": "send transport sameProcess state transportResources",
    "ncclProxyArgs": "nsubs sliceSteps chunkSteps state nChannels nPeers idle collAPI/coll protocol algorithm",
    "ncclProxySubArgs": "connection channelId nsteps groupSize nbytes posted received",
    "sendNetResources": "sendMem recvMem buffers buffSizes",
    "recvNetResources": "sendMem recvMem buffers buffSizes",
    "ncclRecvMem": "connFifo",
}


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


# As the network transport knows the structs: coll_net.cc has others of the same names.
gdb.execute("list 'transport/net.cc':600", to_string=True)
for name, fields in WANTED.items():
    struct = gdb.parse_and_eval(f"(struct {name}*)0").type.target().strip_typedefs()
    print(f"{name}: {struct.sizeof} bytes")
    for names in fields.split():
        offset, kind = next(filter(None, (place(struct, one) for one in names.split("/"))), ("kAbsent", ""))
        print(f"  {names}: {offset} {kind}")
