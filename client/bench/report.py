"""Results of a benchmark, as one JSON document and as cells of a table.

The document: ``benchmark``, ``command``, ``machine``, ``settings``, ``rows``. Keys of rows are an interface: add, don't
rename. Times are milliseconds, bandwidths GB/s (1e9 bytes), null where there is no figure.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from bagua.base.errors import ConfigError
from bagua.base.text import json_text
from bagua.bench.units import size_text

Row = dict[str, Any]


def machine() -> dict[str, Any]:
    """Properties of the machine that figures depend on."""
    model = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not this kind of system: the short name stands
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),  # a process may be kept to some of the machine's cores
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "bagua": metadata.version("bagua"),
    }


def document(benchmark: str, command: str, settings: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "command": command,
        "machine": machine(),
        "settings": dict(settings),
        "rows": list(rows),
    }


def save(report: Mapping[str, Any], path: Path) -> None:
    """Writes the document. Raises ConfigError if that can't be."""
    try:
        path.write_text(json_text(report, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--save {path}: {error.strerror} [BG109]") from error


def number(value: float | None) -> str:
    """Three significant digits; a dash for no figure."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """Writes 0.95 as ``95 %``."""
    return "-" if value is None else f"{value * 100:.0f} %"


def text(value: object) -> str:
    return str(value)


@dataclass(frozen=True)
class Column:
    """A column of a table: the key in rows, the heading, how a value is written."""

    key: str
    heading: str
    write: Callable[[Any], str] = number


def cells(rows: Sequence[Row], columns: Sequence[Column]) -> list[list[str]]:
    """Rows of a table. Columns whose value is nowhere are left out by ``present``."""
    return [[column.write(row.get(column.key)) for column in columns] for row in rows]


def present(rows: Sequence[Row], columns: Sequence[Column]) -> list[Column]:
    """Columns for which at least one row has a value."""
    return [column for column in columns if any(row.get(column.key) is not None for row in rows)]


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """A table of rows with the same keys, which are its headings. None is an empty cell."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [["" if value is None else str(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def values_of(rows: Sequence[Mapping[str, Any]], *keys: str) -> list[Any]:
    """Values of the keys, each once: those of the first key in the order of rows, then those of the next."""
    return list(dict.fromkeys(row[key] for key in keys for row in rows))


def bus_factor(ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth of an all-reduce, as nccl-tests define it."""
    return 2 * (ranks - 1) / ranks


ALLREDUCE = (
    Column("network", "network", text),
    Column("size", "size", text),
    Column("system", "system", text),
    Column("ms", "ms"),
    Column("algbw", "GB/s"),
    Column("busbw", "bus GB/s"),
    Column("times_peer", "x peer"),
    Column("floor_ms", "floor ms"),
    Column("floor_share", "of floor", percent),
)


def allreduce_rows(found: Sequence[Mapping[str, Any]], network: str | None, ranks: int, peer: str) -> list[Row]:
    """Rows of the table from what the ranks measured (``system``, ``bytes``, ``s``, ``floor_s``)."""
    peers = {entry["bytes"]: entry["s"] for entry in found if entry["system"] == peer}
    rows = []
    for entry in found:
        seconds, floor_s = entry["s"], entry["floor_s"] or None
        bandwidth = entry["bytes"] / seconds / 1e9
        against = peers.get(entry["bytes"])
        rows.append(
            {
                "network": network,
                "size": size_text(entry["bytes"]),
                "bytes": entry["bytes"],
                "system": entry["system"],
                "ms": seconds * 1e3,
                "algbw": bandwidth,
                "busbw": bandwidth * bus_factor(ranks),
                "times_peer": against / seconds if against and entry["system"] != peer else None,
                "floor_ms": floor_s * 1e3 if floor_s else None,
                "floor_share": floor_s / seconds if floor_s else None,
            }
        )
    return rows


TRAIN = (
    Column("network", "network", text),
    Column("model", "model", text),
    Column("system", "system", text),
    Column("ms", "ms/step"),
    Column("times_ddp", "x DDP"),
    Column("times_best_ddp", "x best DDP"),
    Column("over_alone", "/ no comm."),
    Column("exposed_ms", "exposed ms"),
    Column("hidden_ms", "hidden ms"),
    Column("sent_mb", "sent MB/step"),
)


def train_rows(found: Sequence[Mapping[str, Any]], network: str | None, model: str, ddp: str, alone: str) -> list[Row]:
    """Rows of the table from what the ranks measured on one model: ``system``, ``kind``, ``parameters``, ``s``,
    ``exposed_s``, ``hidden_s``, ``sent_bytes``."""
    seconds = {entry["system"]: entry["s"] for entry in found}
    best = min((entry["s"] for entry in found if entry["kind"] == "ddp"), default=None)
    rows = []
    for entry in found:
        ours = entry["kind"] == "bagua"
        rows.append(
            {
                "network": network,
                "model": model,
                "parameters": entry["parameters"],
                "system": entry["system"],
                "kind": entry["kind"],
                "ms": entry["s"] * 1e3,
                "times_ddp": seconds[ddp] / entry["s"] if ddp in seconds and entry["system"] != ddp else None,
                "times_best_ddp": best / entry["s"] if best and ours else None,
                "over_alone": entry["s"] / seconds[alone] if alone in seconds and entry["system"] != alone else None,
                "exposed_ms": scaled(entry["exposed_s"], 1e3),
                "hidden_ms": scaled(entry["hidden_s"], 1e3),
                "sent_mb": scaled(entry["sent_bytes"], 1e-6),
            }
        )
    return rows


def scaled(value: float | None, factor: float) -> float | None:
    """``value * factor``; None stays None."""
    return None if value is None else value * factor


CODEC = (
    Column("size", "size", text),
    Column("codec", "codec", text),
    Column("encode", "encode GB/s"),
    Column("decode_add", "decode-and-add GB/s"),
    Column("recode", "recode GB/s"),
    Column("ratio", "ratio"),
    Column("error", "error"),
    Column("memcpy", "memcpy GB/s"),
)


def codec_rows(found: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows of the table from what a rank measured: ``bytes`` of float32, ``codec``, seconds ``encode_s``,
    ``decode_add_s``, ``recode_s``, ``memcpy_s``, ``message_bytes``, ``error``."""
    return [
        {
            "size": size_text(entry["bytes"]),
            "bytes": entry["bytes"],
            "codec": entry["codec"],
            **{key: entry["bytes"] / entry[f"{key}_s"] / 1e9 for key in ("encode", "decode_add", "recode", "memcpy")},
            "ratio": entry["bytes"] / entry["message_bytes"],
            "error": entry["error"],
        }
        for entry in found
    ]


NETWORK = (
    Column("network", "network", text),
    Column("source", "from", text),
    Column("target", "to", text),
    Column("gbits", "Gbit/s"),
    Column("latency_us", "one way, us"),
)


def network_rows(found: Sequence[Mapping[str, Any]], network: str | None, names: Mapping[int, str]) -> list[Row]:
    """Rows of the report from what the ranks measured (``source``, ``target``: ranks; ``bits_per_s``,
    ``latency_s``); ``names``: node of each rank."""
    return [
        {
            "network": network,
            "source": names[entry["source"]],
            "target": names[entry["target"]],
            "gbits": entry["bits_per_s"] / 1e9,
            "latency_us": entry["latency_s"] * 1e6,
        }
        for entry in found
    ]


def matrix(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns (headings, cells): senders down, receivers across, ``Gbit/s / us one way`` in between."""
    names = values_of(rows, "source", "target")
    figures = {(row["source"], row["target"]): row for row in rows}

    def cell(source: str, target: str) -> str:
        row = figures.get((source, target))
        return "" if row is None else f"{number(row['gbits'])} / {number(row['latency_us'])}"

    return ["from \\ to", *names], [[source, *(cell(source, target) for target in names)] for source in names]
