"""Types of the native module ``bagua_core_native`` that ``bagua.csrc.load()`` returns (see csrc/core/bindings)."""

from collections.abc import Callable, Sequence
from typing import Any, final

from typing_extensions import Buffer

class CoreError(RuntimeError):
    """An operation failed: the first error of the engine, in words (peer, operation, time waited, what to do)."""

class Regrouped(CoreError):
    """The generation has ended before the operation was done, and the job has not: ``Rank.enter()`` the next one."""

class Dismissed(CoreError):
    """The job goes on without this process, as was planned (scaled down, a node that is drained): it may end."""

# Kinds of operation, dtypes and reductions, as small integers (csrc/core/channel/layout.h is their home).
KINDS: dict[str, int]  # barrier allreduce broadcast reduce allgather reduce_scatter gather scatter alltoall send recv
# move_residuals (layout.h: ResidualMove)
DTYPES: dict[str, int]  # float32 float64 float16 bfloat16 int32 int64 uint8 (and bool, int8, int16 for moves)
CODECS: dict[str, int]  # none fp16 bf16 fp8_e4m3 fp8_e5m2 minmax8 int4 onebit topk int2
OPS: dict[str, int]  # SUM PRODUCT MIN MAX BOR BAND BXOR AVG (numbers of bagua.torch_api.ReduceOp)

@final
class Engine:
    """Host leg of one job on one node, one generation at a time; lives in the node daemon. Thread-safe.

    Creates the Unix socket ``data_socket`` (mode 0600) for the local ranks and a TCP listener for the other hosts.
    """

    def __init__(
        self,
        *,
        job_id: str,
        generation: int,
        host_index: int,
        hosts: Sequence[Sequence[int]],  # ranks of every host, in ring order
        data_socket: str,
        tokens: dict[int, bytes],  # local member -> 32 bytes that it shows at connect
        job_key: bytes,  # 32 bytes
        listen: str,  # "address:port", port 0: any; not opened when there is one host
        streams: int = 4,
        chunk_bytes: int = 524288,
        threads: int = 0,  # 0: by the number of cores
        connect_timeout_s: float = 30.0,
        memory_limit: int = 0,  # bytes of tensor memory of all local ranks together; 0: what the host can give
        # Silence of a host that is waited for: then the job fails, and names it. Elastic jobs wait as long as eight
        # training steps take, at least 5 s, once they know how long one takes.
        peer_timeout_s: float = 30.0,
        # With at least 4 hosts: measure the bandwidths between them before the first operation and let rings go round
        # accordingly. Host 0's word counts. Sums of floats depend on the order.
        measure_ring: bool = True,
        # Which connections to other hosts are encrypted: "beyond loopback", "always" or "never". Both ends must come to
        # the same.
        encryption: str = "beyond loopback",
        members: Sequence[int] | None = None,  # number of each rank's process, for life; None: the ranks
        elastic: bool = False,  # the loss of a member suspends the generation, and another one may follow
        # This node is in no generation yet: the first one is a lobby, of its newcomers alone (one host; ``members`` are
        # their new numbers, ``generation`` the job's present one).
        newcomers: bool = False,
        # Descriptor of an anonymous file, empty or of an engine whose process was killed, with what outlives the
        # engine: residuals of error feedback. The engine makes a copy. -1: memory of its own.
        memory: int = -1,
        # User of the local ranks, who owns the socket; -1: this process's.
        rank_uid: int = -1,
    ) -> None: ...
    def regroup(
        self,
        *,
        generation: int,
        host_index: int,
        hosts: Sequence[Sequence[int]],
        members: Sequence[int] | None = None,
        tokens: dict[int, bytes] = ...,  # of local members that are new
    ) -> None:
        """Elastic engines: ends the present generation, suspended or not, and opens the next one, which waits for
        ``set_peers``. Operations that are not done raise Regrouped, and members that stay enter the next one with their
        memory; that of others here is freed. Raises CoreError, and nothing changes, if it can't follow."""
    def open_lobby(self, *, members: Sequence[int], tokens: dict[int, bytes]) -> None:
        """Elastic engines: these newcomers get a lobby beside the present generation: a small generation of their own,
        until a plan or ``regroup`` takes them in. A newcomer that is lost suspends the lobby alone. One lobby at a
        time: raises CoreError while somebody is left in the last one."""
    def plan(
        self,
        *,
        generation: int,
        host_index: int = 0,
        hosts: Sequence[Sequence[int]] = (),
        members: Sequence[int] | None = None,
        peers: Sequence[str] = (),
        hold: bool = False,
    ) -> None:
        """Elastic engines: this generation follows at a boundary: as soon as all members of the present one that are
        here, and the newcomers here that it takes in, wait in ``Rank.enter``. Ranks see its number in
        ``Rank.planned()``. The engine then does what ``regroup`` and ``set_peers(peers)`` do, and tells "regrouped".
        Members that are not in it get Dismissed, and are nobody's loss afterwards; a lobby of which it takes nobody
        stays. ``host_index`` -1: it goes on without this host. ``hold``: ranks wait in ``enter`` for a later plan.

        A later plan or ``regroup`` takes its place. The same number again changes nothing. Raises CoreError, and
        nothing changes, if it can't follow."""
    def address(self) -> str:
        """``host:port`` of the TCP listener; empty with one host, unless the engine is elastic."""
    def set_peers(self, addresses: Sequence[str]) -> None:
        """Addresses of all hosts in ring order; communicators connect from then on. Calling it again is harmless."""
    def event_fd(self) -> int:
        """Readable while ``events()`` has something to tell."""
    def events(self) -> list[dict[str, Any]]:
        """Takes what happened: {"kind": "joined"|"left"|"lost"|"error"|"ring"|"suspended"|"ready_to_join"|"regrouped"|
        "lobby_failed"|"scarce"|"failed"|"told_lost", "rank": int (a member's number; -1: none), "text": str}.
        "ring": the order of the hosts in rings and why, "ring order 0 2 1 3: slowest link 0.9 Gbit/s".
        "suspended", once in a generation: it lost that member, or the host whose index is "host" (-1: none), or another
        host has ended it; "generation" is its number, "accused" the hosts with which this one could not talk itself,
        "passes" the number of backward passes that a local rank had begun. An "error" has the "host", too, if it tells
        of the loss of one. A lobby is suspended without that: "lost" tells of it. "ready_to_join": this newcomer waits
        in ``Rank.enter``.
        "regrouped": the planned "generation" has begun here, or has dismissed all that were here; "passes" as above.
        "lobby_failed": the newcomers made a mistake; the present generation does not know of it. "scarce": there are no
        file descriptors for connections, which wait; told once a minute. "failed", "told_lost": that member has called
        ``Rank.fail``, with these words."""
    def error(self) -> str:
        """The first error, empty while there is none. A suspended generation has none."""
    def waiting(self, longer_than_s: float) -> str:
        """Operations that have waited for longer, one line each with the ranks that wait and those that are missing;
        empty if there is none."""
    def step_s(self) -> float:
        """Median time of a training step in elastic engines, of all collectives that local ranks called; 0 while it is
        not known."""
    def start_trace(self, *, request: int, most: int) -> None:
        """Local ranks see ``request`` in ``Rank.trace()``, and ``most`` spans of this host's collectives are
        recorded."""
    def set_fence(self, at_ns: int) -> None:
        """Local ranks stop themselves at that time of CLOCK_BOOTTIME; 0: never."""
    def stop_trace(self) -> tuple[list[tuple[str, str, int, int, int, int, int, int]], int]:
        """Ends that. (phase, name of the operation, communicator, number of the operation there, begin, end, peer,
        bytes) of each span, in ns of CLOCK_MONOTONIC, and how many there was no room for. Phases and their peers:
        csrc/core/engine/values/trace.h."""
    def abort(self, reason: str) -> None:
        """Fails every pending and later operation with this reason, here and on the other hosts (but those that are
        suspended); no generation follows. First call wins."""
    def withdraw(self, reason: str) -> None:
        """This host ends its part. Elastic jobs go on without it, at once; others are over. Thread-safe."""
    def stats(self) -> dict[str, int]:
        """bytes_local, bytes_sent, bytes_received, ops, frames_dropped, bad_connections, segment_bytes, comm_ns,
        residual_bytes, bytes_encrypted (of bytes_sent), frames_refused (damaged or not authentic)."""
    def close(self) -> None:
        """Ends threads, closes sockets, unmaps memory. Idempotent; pending operations fail first."""

@final
class Flags:
    """A fenced all-reduce of three int32, MAX, which the core fills as it is submitted: ``given``, its opposite, and
    ``Rank.planned()``. ``ticket``: 0 unless it is under way; who waits for it by ``Rank.wait`` sets it to 0."""

    given: int
    ticket: int

@final
class Segment(Buffer):
    """Shared memory that the daemon made for this rank (memfd, sealed, pre-faulted). Writable buffer; unmapped when
    the last view of it is gone."""

    @property
    def id(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class PendingTransfer:
    """The rest of an operation that took longer than the timeout of ``Rank.transfer``."""

    def wait(self, timeout_s: float) -> bool:
        """Goes on with it; True when it is over. Raises CoreError."""

@final
class Call:
    """One kind of operation for ``Rank.transfer``, without its size and place. It may be used again and again."""

    def __init__(
        self,
        *,
        kind: int,
        dtype: int,
        op: int = 0,
        root: int = -1,
        src_rows: int = 1,  # src holds so many times count elements
        dst_rows: int = 1,
        together: bool = False,  # src and dst may share a place in shared memory, and do if there is no dst
        codec: int = 0,
        density: int = 0,
    ) -> None: ...

@final
class Rank:
    """A rank's end of the channel to its daemon. It lives in the training process. Thread-safe."""

    def __init__(self, *, data_socket: str, token: bytes, rank: int, timeout_s: float = 30.0) -> None:
        """``rank``: the number of the member, which is its rank in a job that has lost nobody."""
    def view(self) -> dict[str, Any]:
        """The generation that this rank is in: {"generation": int, "rank": int, "hosts": list[list[int]] (ranks of each
        host), "members": list[int] (by rank), "elastic": bool, "newcomer": bool (it is a lobby)}."""
    def planned(self) -> int:
        """Number of the newest generation that is planned, 0: there was none. Costs one read of memory. A rank whose
        generation is older goes to ``enter`` after its step, when all others do."""
    def trace(self) -> int:
        """Returns 0, or a request to record the next steps of this rank: its number << 16 | steps. Costs one read of
        memory.
        """
    def enter(self, timeout_s: float = -1.0) -> dict[str, Any] | None:
        """Waits (GIL released, signals honoured) for a generation after this one, enters it, returns its ``view()``.
        Memory and tickets stay; communicators but the world are gone, and are declared again with the new ranks. None:
        the timeout passed, or ask again. Raises Dismissed, or CoreError: the job is over, or has lost this rank, or the
        lobby has lost a newcomer before this one was ready."""
    def require(self, nbytes: int) -> None:
        """Announces that this rank is going to allocate ``nbytes`` in all. Raises CoreError with what the job needs on
        this host and what is left, if that can't be had. Ranks that have not called it count as this one."""
    def alloc(self, nbytes: int, for_peers: bool = False) -> Segment:
        """Shared memory of at least ``nbytes`` (rounded up to pages). ``for_peers``: other ranks of this host may
        borrow it; at most 256 of these. Raises CoreError with the reason."""
    def borrow(self, owner: int, segment_id: int) -> Segment:
        """Maps memory that another member of the job on this host has made ``for_peers``. It stays mapped here when its
        owner frees it. Raises CoreError if there is none."""
    def free(self, segment_id: int) -> None:
        """Gives the segment back; the daemon unmaps it. Operations in flight on it must have ended."""
    def create_comm(self, comm: int, ranks: Sequence[int], timeout_s: float = 60.0) -> None:
        """Declares communicator ``comm``, 1 to 2**32 - 1 (its members, sorted global ranks; all declare the same).
        Comm 0 is the world and exists from the start. A number may be used again after ``destroy_comm``, with the same
        or other members. Raises CoreError, and the job fails with the same words everywhere, if the number means other
        members at the same time."""
    def destroy_comm(self, comm: int) -> None:
        """This rank uses it no more. What it has sent still arrives; other members may be far behind. An operation that
        others call and this rank has not called fails."""
    def submit(
        self,
        *,
        comm: int,
        kind: int,
        dtype: int,
        op: int = 0,
        count: int,
        root: int = -1,
        src: tuple[int, int] = (0, 0),  # segment id, byte offset
        dst: tuple[int, int] = (0, 0),
        shape: Sequence[int] = (),
        label: str = "",
        codec: int = 0,
        density: int = 0,
        residual: int = 0,
        exact: int = 0,
        residual_sides: int = 0,
        fenced: bool = False,
        chunk_kib: int = 0,
        generation: int = 0,
        behind: Flags | None = None,
        defer: bool = False,
    ) -> int:
        """Hands one operation to the daemon and returns its ticket at once. ``count`` and the meaning of src and dst
        per kind: see csrc/core/channel/layout.h. Raises CoreError if the engine has failed.

        All-reduce of float32 with SUM or AVG may cross between hosts encoded: ``codec`` and ``density`` (``CODECS``).
        ``residual`` > 0 names an error-feedback residual of this communicator, which the engine makes (zeros, ``count``
        float32) at first use and keeps until ``destroy_comm``. ``residual_sides``: 0 changes it in place, 1 reads its
        side 0 and writes side 1, 2 reads side 1 and writes side 0. The last ``exact`` elements cross as they are.

        ``fenced``: a collective that begins on a host when all that were submitted before it on its communicator are
        done there. So who sees its end knows that they are done on all hosts. Ranks need not agree on it.

        ``chunk_kib``: an all-reduce goes between hosts in chunks of so many KiB, the same on all ranks; 0: as the
        engine was told. With two hosts results do not depend on it.

        Raises Regrouped, as ``wait`` and ``transfer`` do, if the generation has ended, or another one than
        ``generation`` has been entered (0: whichever it is).

        ``behind``: flags that are submitted right behind this operation, and with it: both or none. The daemon is woken
        once.

        ``defer``: the caller waits for it next, with nothing in between. A small all-reduce inside a host is then done
        by the ranks without the daemon, if the daemon does nothing else for the communicator."""
    def flags(self, comm: int, values: int, place: tuple[int, int]) -> Flags:
        """``values``: address of three int32 in shared memory, at ``place``."""
    def send_flags(self, flags: Flags, generation: int = 0) -> None:
        """Submits them, as ``submit`` does."""

    def transfer(
        self,
        call: Call,
        comm: int,
        count: int,  # elements of one row
        src: int,  # address; 0: this rank gives nothing
        dst: int,  # address; 0: this rank gets nothing. May be src
        shape: Sequence[int],
        timeout_s: float,
        generation: int,
        /,
    ) -> PendingTransfer | None:
        """Carries out one operation on contiguous tensors at any address: submits, copies in and out what does not lie
        in shared memory (in pieces, if large), waits (GIL released, signals honoured). None: done. Else the timeout
        passed and the rest is to be waited for; the memory must stay. Raises CoreError; dst may then hold parts of the
        result."""
    def done(self, ticket: int) -> bool: ...
    def abandon(self, ticket: int) -> None: ...
    def wait_all(
        self, tickets: Sequence[int], behind: Flags | None = None, timeout_s: float = -1.0
    ) -> tuple[list[tuple[int, int, int]], tuple[int, int, int]] | None:
        """Waits for several, in the order in which they were submitted, and for flags behind them: the times of the
        operations, and what the flags say (zeros without any). It sleeps once where the last one is over last. No
        times: one is not over well; None: the timeout passed. Then each is still to be waited for."""
    def wait(self, ticket: int, timeout_s: float = -1.0) -> tuple[int, int, int] | None:
        """Waits (GIL released, signals honoured) and returns (submitted, started, done) in ns of CLOCK_MONOTONIC;
        started is when all local members had submitted. None: the timeout passed and the operation goes on. Raises
        CoreError. Each ticket is waited for once."""
    def host_api(self) -> object:
        """A capsule for the GPU leg (csrc/core/channel/host_api.h); good as long as this object."""
    def counters(self) -> dict[str, int]:
        """Counters of this host's engine, as ``Engine.stats``, read from shared memory."""
    def error(self) -> str: ...
    def note_passes(self, passes: int) -> None:
        """This rank has begun so many backward passes: for the words of errors. Costs one write to memory."""
    def fail(self, text: str, lost: bool = False) -> None:
        """Closes the connection of a rank that ends in the middle of the job: ``text`` says how, for people (2 KiB of
        UTF-8 are told). It ends the job, elastic ones, too, unless the rank is ``lost`` through no fault of the
        program.
        """
    def close(self, words: str = "") -> None:
        """Says goodbye. ``words``: the exception that the program is handling."""

def set_wire_version(number: int) -> None:
    """Tells this process's number of all that it says to ranks, daemons and hosts (csrc/wire_version.py)."""

def on_system_exit(callback: Callable[[SystemExit], None] | None) -> None:
    """Gives ``callback`` each SystemExit that is made by its own constructor, in the thread that makes it."""

def spawn(
    argv: Sequence[str],
    env: dict[str, str],
    cwd: str,
    stdout_fd: int,
    stderr_fd: int,
    death_signal: int = 9,
    user: tuple[int, int, Sequence[int], int, Sequence[tuple[int, int, int]]] | None = None,
) -> int:
    """Starts a program in a session and process group of its own, with stdin from /dev/null, every other descriptor
    closed and ``death_signal`` delivered to it when the calling process dies; returns its pid. ``user``: (uid, gid,
    groups, umask, limits) to run with, each limit (resource, soft, hard), -1 for none. Raises OSError."""

def reduce(dtype: int, op: int, inputs: Sequence[Buffer], output: Buffer, count: int, scale: int = 1) -> None:
    """The local reduction kernel, for tests: output[i] = op(inputs[0][i], …) with AVG dividing by ``scale``."""

def encoded_bytes(codec: int, count: int, density: int = 0) -> int:
    """Length of the message that ``count`` float32 elements become."""

def transcode(
    codec: int,
    count: int,
    *,
    raw: Sequence[Buffer] = (),
    encoded: Sequence[Buffer] = (),
    scale: float = 1.0,
    residual: Buffer | None = None,
    message: Buffer | None = None,
    decoded: Sequence[Buffer] = (),
    density: int = 0,
) -> None:
    """Calls the codec kernel once (csrc/core/codec/codec.h says what it computes), for tests and benchmarks. Raises
    ValueError for buffers that are too short, unaligned or read-only."""

# See csrc/core/kernel/low_rank.h. ValueError for buffers that are too short, unaligned or read-only.

def low_rank_project(
    rows: int,
    columns: int,
    rank: int,
    *,
    memory: Buffer,
    gradient: Buffer,
    left: Buffer,
    right: Buffer,
    projected: Buffer,
) -> None: ...
def low_rank_back_project(
    rows: int, columns: int, rank: int, *, memory: Buffer, left: Buffer, right: Buffer
) -> None: ...
def low_rank_product(rows: int, columns: int, rank: int, *, left: Buffer, right: Buffer, result: Buffer) -> None: ...
def crc32c(data: Buffer, seed: int = 0) -> int: ...
