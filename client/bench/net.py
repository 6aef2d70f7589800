"""Bagua-Net beside plain sockets: pairs of processes that pass messages, turn by turn, on this machine's loopback or
between the two hosts of an emulated network. The processes are csrc/tools/net_bench.cpp and iperf3."""

from __future__ import annotations

import json
import os
import select
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua.base.errors import ServiceError
from bagua.bench.emulation import DEVICE, SEARCH_PATH, Emulation, built
from bagua.bench.report import Column, Row, percent, scaled, text, values_of
from bagua.bench.units import size_text
from bagua.tuning.network import TCP_SHARE, Network

BAGUA = "bagua-net"
SINGLE = "1 socket"
NCCL = "as NCCL"
POLLING = "1 socket, polling"
IPERF = "iperf3"
ANSWER_DEADLINE_S = 120.0
START_DEADLINE_S = 10.0
MOST_MESSAGES = 20_000
MOST_PINGS = 500
FIRST_BYTES = 8 << 20  # bytes in the unmeasured warm-up stream
FIRST_PINGS = 4  # number of warm-up pings

COLUMNS = (
    Column("network", "network", text),
    Column("size", "size", text),
    Column("system", "system", text),
    Column("gbits", "Gbit/s"),
    Column("times_single", "x 1 socket"),
    Column("wire_share", "of wire", percent),
    Column("latency_us", "one way, us"),
    Column("latency_over_single", "/ 1 socket"),
    Column("times_nccl", "x NCCL"),
    Column("latency_over_nccl", "latency / NCCL"),
)


Arguments = Callable[["Place"], Sequence[str]]  # Arguments of net_bench at a place


def multiple(streams: int) -> str:
    """The name of the program with several sockets."""
    return f"{streams} sockets"


@dataclass(frozen=True)
class Place:
    """Place of one of the two processes: its address and interface, and a command that leads there."""

    address: str
    interface: str
    prefix: tuple[str, ...] = ()


def places(emulation: Emulation | None) -> tuple[Place, Place]:
    """Returns the places of the two ends."""
    if emulation is None:
        return Place("127.0.0.1", "lo"), Place("127.0.0.1", "lo")
    near, far = (
        Place(address, DEVICE, ("ip", "netns", "exec", name))
        for address, name in zip(emulation.addresses, emulation.names, strict=True)
    )
    return near, far


def halves(cores: Iterable[int]) -> tuple[set[int], set[int]]:
    """The cores of the two ends: half each, as two hosts have their own; all for both where there is only one."""
    found = sorted(cores)
    half = len(found) // 2
    return (set(found[:half]), set(found[half:])) if half else (set(found), set(found))


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Processes that are started meanwhile run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class End:
    """Process of a pair."""

    def __init__(self, place: Place, arguments: Sequence[str], cores: set[int]) -> None:
        # =: this name alone, and not all that begin with it.
        environment = {**os.environ, "NCCL_SOCKET_IFNAME": f"={place.interface}", "PATH": SEARCH_PATH}
        with on_cores(cores):
            self._process = subprocess.Popen(
                [*place.prefix, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,  # each line is sent at once
                env=environment,
                start_new_session=True,  # a Ctrl-C is for us
            )

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
        except OSError:
            self._gone()

    def answer(self) -> str:
        """Reads its next line. Raises ServiceError if it ends, or says nothing for long."""
        output = self._process.stdout
        assert output is not None
        ready, _, _ = select.select([output], [], [], ANSWER_DEADLINE_S)
        line = output.readline() if ready else ""
        if not line:
            self._gone(f"says nothing for {ANSWER_DEADLINE_S:.0f} s" if not ready else "")
        return line.strip()

    def _gone(self, words: str = "") -> None:
        words = words or f"ended with code {self._process.wait(10)}"
        raise ServiceError(f"A process of the benchmark {words}: {' '.join(map(str, self._process.args))} [BG001]")  # type: ignore[arg-type]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Pair:
    """Pair of processes with a connection in each direction; they wait without work between two measurements."""

    def __init__(self, program: Path, arguments: Arguments, ends: tuple[Place, Place]) -> None:
        self._ends: list[End] = []
        try:
            for place, cores in zip(ends, halves(os.sched_getaffinity(0)), strict=True):
                self._ends.append(End(place, [str(program), *arguments(place)], cores))
            handles = [end.answer().removeprefix("handle ") for end in self._ends]
            for end, handle in zip(self._ends, reversed(handles), strict=True):  # each end connects to the other's
                end.send(handle)
            for end in self._ends:
                if end.answer() != "ready":
                    raise ServiceError(f"The processes of {program.name} can't connect. [BG001]")
        except BaseException:
            self.close()
            raise

    def measure(self, pattern: str, size: int, count: int) -> float:
        """Seconds per message of ``size`` bytes: ``stream`` of so many, or one way of a ``ping``."""
        for end, role in zip(self._ends, ("send", "receive"), strict=True):
            end.send(f"{role} {pattern} {size} {count}")
        answers = [int(end.answer()) for end in self._ends]
        # The sender's clock; a ping goes there and back.
        return answers[0] / 1e9 / count / (2 if pattern == "ping" else 1)

    def close(self) -> None:
        for end in self._ends:
            end.close()


def arguments_of(system: str, streams: int) -> Arguments:
    """Arguments of net_bench, by place. Raises BuildError."""
    if system == BAGUA:
        library = str(built("net_plugin"))
        return lambda _: ["plugin", library]
    if system in (NCCL, POLLING):
        return lambda place: ["nccl" if system == NCCL else "polling", place.address]
    return lambda place: ["sockets", place.address, str(1 if system == SINGLE else streams)]


def measure(config: Mapping[str, Any], network: Network | None, note: Callable[[str], None]) -> list[dict[str, Any]]:
    """Times of each system: ``system``, ``bytes`` (None: any), ``stream_s``, ``ping_s`` per message, medians of
    rounds in which the systems take turns. Raises BaguaError."""
    program = built("net_bench")
    systems = {name: arguments_of(name, config["streams"]) for name in config["systems"] if name != IPERF}
    with ExitStack() as stack:
        emulation = stack.enter_context(Emulation(network)) if network is not None else None
        ends = places(emulation)
        found = []
        for size in config["sizes"] if systems else ():
            note(f"{network.name if network else 'loopback'}, {size_text(size)}")
            found += measure_size(lambda: _open(program, systems, ends), size, config)
        if IPERF in config["systems"]:
            note(f"{network.name if network else 'loopback'}, {IPERF}")
            found += [measure_iperf(ends, count, config) for count in dict.fromkeys((1, config["streams"]))]
        return found


@contextmanager
def _open(program: Path, systems: Mapping[str, Arguments], ends: tuple[Place, Place]) -> Iterator[dict[str, Pair]]:
    """A pair of each system. Raises ServiceError."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(closing(Pair(program, make, ends))) for name, make in systems.items()}


def measure_size(
    open_pairs: Callable[[], AbstractContextManager[Mapping[str, Pair]]], size: int, config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Measures one size, with as many messages per turn as the quickest system passes in its share of the time. Every
    round has processes and connections of its own: where their memory lies, and what TCP makes of a connection, is
    worth a tenth, and would go into the medians of all rounds otherwise.
    """
    first = max(1, min(64, FIRST_BYTES // size))
    patterns = (("stream", first, MOST_MESSAGES), ("ping", min(first, FIRST_PINGS), MOST_PINGS))
    counts: dict[str, int] = {}
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(config["rounds"]):
        with open_pairs() as pairs:
            # Half of it for streams, half for pings.
            share = config["seconds"] / max(1, config["rounds"]) / max(1, len(pairs)) / 2
            for pattern, some, most in patterns:
                # Twice: buffers are touched, windows of TCP are open.
                warm = [min(pair.measure(pattern, size, some) for _ in range(2)) for pair in pairs.values()]
                # Found once: all rounds have equal counts.
                counts.setdefault(pattern, max(1, min(most, int(share / max(min(warm), 1e-9)))))
            names = list(pairs)
            start = turn % max(1, len(names))  # no system is always the first
            for name in names[start:] + names[:start]:
                for pattern, count in counts.items():
                    times.setdefault((name, pattern), []).append(pairs[name].measure(pattern, size, count))
    return [
        {
            "system": name,
            "bytes": size,
            "stream_s": statistics.median(times[name, "stream"]),
            "ping_s": statistics.median(times[name, "ping"]),
        }
        for name in names
    ]


def measure_iperf(ends: tuple[Place, Place], streams: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """iperf3 with so many streams, as a row of no size. Raises ServiceError."""
    seconds = max(1, round(config["seconds"] / 2))
    rates = []
    for turn in range(config["rounds"]):
        port = 20000 + (os.getpid() * 16 + streams + turn) % 10000
        rates.append(_iperf_once(ends, streams, seconds, port))
    return {"system": f"{IPERF}, {streams}", "bytes": None, "bits_per_s": statistics.median(rates)}


def _iperf_once(ends: tuple[Place, Place], streams: int, seconds: int, port: int) -> float:
    near, far = ends
    program = shutil.which(IPERF, path=SEARCH_PATH) or IPERF
    near_cores, far_cores = halves(os.sched_getaffinity(0))
    with on_cores(far_cores):
        server = subprocess.Popen(
            # --forceflush: its word comes at once, and not when a buffer is full.
            [*far.prefix, program, "-s", "-1", "-B", far.address, "-p", str(port), "--forceflush"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_for_word(server, b"listening")
        command = [program, "-c", far.address, "-p", str(port), "-J", "-P", str(streams), "-t", str(seconds)]
        with on_cores(near_cores):
            done = subprocess.run(
                [*near.prefix, *command], capture_output=True, text=True, timeout=seconds + ANSWER_DEADLINE_S
            )
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"{IPERF} does not end: {error} [BG001]") from error
    finally:
        server.kill()
        server.communicate()
    report = json.loads(done.stdout or "{}")
    if done.returncode or "error" in report:
        raise ServiceError(f"{IPERF} failed: {report.get('error') or done.stderr.strip()} [BG001]")
    return float(report["end"]["sum_received"]["bits_per_second"])


def _wait_for_word(process: subprocess.Popen[bytes], word: bytes) -> None:
    assert process.stdout is not None
    said = b""
    while word not in said:
        ready, _, _ = select.select([process.stdout], [], [], START_DEADLINE_S)
        more = os.read(process.stdout.fileno(), 4096) if ready else b""
        if not more:
            raise ServiceError(f"{IPERF}'s server does not start: {said.decode(errors='replace').strip()} [BG001]")
        said += more


def rows_of(found: Sequence[Mapping[str, Any]], network: Network | None) -> list[Row]:
    """Rows of the table from what ``measure`` found."""
    peers = {(entry["system"], entry["bytes"]): entry for entry in found}
    return [_row(entry, peers, network) for entry in found]


def _beside(entry: Mapping[str, Any], peer: Mapping[str, Any] | None) -> tuple[float | None, float | None]:
    """Returns throughput and one-way time in multiples of the peer's; None if there is nothing to compare."""
    if peer is None or peer is entry or entry["bytes"] is None:
        return None, None
    return peer["stream_s"] / entry["stream_s"], entry["ping_s"] / peer["ping_s"]


def _row(
    entry: Mapping[str, Any], peers: Mapping[tuple[str, int | None], Mapping[str, Any]], network: Network | None
) -> Row:
    size = entry["bytes"]
    bits = entry["bits_per_s"] if size is None else size * 8 / entry["stream_s"]
    times_single, latency_single = _beside(entry, peers.get((SINGLE, size)))
    times_nccl, latency_nccl = _beside(entry, peers.get((NCCL, size)))
    return {
        "network": network.name if network else None,
        "size": "any" if size is None else size_text(size),
        "bytes": size,
        "system": entry["system"],
        "gbits": bits / 1e9,
        "times_single": times_single,
        "wire_share": bits / (network.rate * TCP_SHARE) if network and network.rate else None,
        "latency_us": scaled(entry.get("ping_s"), 1e6),
        "latency_over_single": latency_single,
        "times_nccl": times_nccl,
        "latency_over_nccl": latency_nccl,
    }


def plot(report: dict[str, Any], path: Path) -> None:
    """Throughput and one-way time over the size, a line per system; a row of pictures per network."""
    from bagua.bench.plots import FLOOR_STYLE, new_figure, save_figure, size_axes

    networks = values_of(report["rows"], "network")
    figure, all_axes = new_figure(2, len(networks))
    for index, name in enumerate(networks):
        rows = [row for row in report["rows"] if row["network"] == name]
        for axes, key, label in zip(
            all_axes[2 * index :], ("gbits", "latency_us"), ("Gbit/s", "one way, us"), strict=False
        ):
            for system in values_of(rows, "system"):
                points = [(row["bytes"], row[key]) for row in rows if row["system"] == system]
                if points[0][0] is not None:
                    axes.plot(*zip(*points, strict=True), marker="o", label=system)
                elif key == "gbits":  # iperf3 has one rate for all sizes
                    axes.axhline(points[0][1], label=system, **FLOOR_STYLE)
            size_axes(axes, rows, "message")
            axes.set(ylabel=label, title=f"between two processes, {name or 'loopback'}")
            axes.grid(True, which="both", alpha=0.3)
            axes.legend()
    save_figure(figure, path)
