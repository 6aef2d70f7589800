#include "c10d/direct.h"

#include <c10/util/Exception.h>
#include <errno.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>

namespace bagua::dist {

namespace {

constexpr size_t kPiece = 128 << 10;  // bytes of each rank: all of them stay in the cache while they are added up

ssize_t read_some(pid_t pid, void* to, uint64_t from, size_t bytes) {
  const iovec here{to, bytes}, there{reinterpret_cast<void*>(from), bytes};
  return process_vm_readv(pid, &here, 1, &there, 1, 0);
}

void read(const Peers& peers, size_t rank, uint64_t offset, char* to, size_t bytes) {
  uint64_t from = peers.places[rank] + offset;
  while (bytes > 0) {
    const ssize_t done = read_some(peers.processes[rank], to, from, bytes);
    if (done < 0 && errno == EINTR) continue;
    TORCH_CHECK_WITH(DistBackendError, done > 0, "the memory of rank ", rank, " of the group (process ",
                     peers.processes[rank], ") can't be read: ", done == 0 ? "it ends" : strerror(errno),
                     ". Has it ended? [BG502]");
    to += done;
    from += static_cast<uint64_t>(done);
    bytes -= static_cast<size_t>(done);
  }
}

}  // namespace

bool can_read(pid_t pid, uint64_t address, uint64_t nonce) {
  uint64_t found = 0;
  return read_some(pid, &found, address, sizeof found) == static_cast<ssize_t>(sizeof found) && found == nonce;
}

void gather_directly(const Peers& peers, const char* src, char* dst, size_t bytes) {
  const size_t ranks = peers.processes.size(), own = static_cast<size_t>(peers.own);
  if (dst + own * bytes != src) memmove(dst + own * bytes, src, bytes);
  for (size_t step = 1; step < ranks; ++step) {
    const size_t rank = (own + step) % ranks;
    read(peers, rank, 0, dst + rank * bytes, bytes);
  }
}

void reduce_directly(const Peers& peers, const Host& host, const Reduction& reduction, const char* src, char* dst,
                     size_t count) {
  const size_t ranks = peers.processes.size(), own = static_cast<size_t>(peers.own);
  const size_t element = host.api().dtype_bytes(static_cast<uint8_t>(reduction.element.dtype));
  const size_t most = kPiece / element, block = own * count * element;
  std::vector<char> pieces(ranks * kPiece);
  for (size_t begin = 0; begin < count; begin += most) {
    const size_t length = std::min(most, count - begin), offset = block + begin * element;
    std::vector<const void*> sources;
    for (size_t rank = 0; rank < ranks; ++rank) {
      char* const piece = pieces.data() + rank * kPiece;
      if (rank != own) read(peers, rank, offset, piece, length * element);
      sources.push_back(rank == own ? src + offset : piece);
    }
    void* const result = dst + begin * element;
    host.api().reduce(static_cast<uint8_t>(reduction.element.dtype), static_cast<uint8_t>(reduction.op), sources.data(),
                      static_cast<int>(ranks), result, length);
  }
}

}  // namespace bagua::dist
