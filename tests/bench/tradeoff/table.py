"""Step times beside the accuracy of docs/accuracy.md, for the same settings; and all-reduces of two and more emulated
hosts beside the model."""

import json
from pathlib import Path

from bagua.bench import accuracy
from bagua.bench.units import size_text
from bagua.tuning.network import Network, parse_network
from bagua.tuning.predict import Cluster, Coding, bucket_cost
from tradeoff.grid import FAMILIES, FULL, TEXTS, step_ms

PAGE = Path(__file__).resolve().parents[3] / "docs" / "accuracy.md"
HOSTS = 8
WIRES = (Network(1e10, 0.001), Network(1e9), Network(1e9, 0.005), Network(1e8, 0.02))


def accuracies():
    """Of docs/accuracy.md, by the name of the setting: difference of digits, of charlm, and bytes of the second half
    (digits)."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    by_text = {cells[0]: cells for cells in rows}
    found = {}
    for setting in accuracy.SETTINGS:
        first = f"`{setting.algorithm}`"
        own = f"`{setting.optimizer}`"
        cells = next(
            cells
            for text, cells in by_text.items()
            if text.startswith(first) and (own in text.removeprefix(first) or setting.optimizer == "adamw")
        )
        found[setting.name] = (cells[2].replace("*", ""), cells[6].replace("*", ""), cells[4])
    return found


def joined(profile):
    """A Markdown table: a row for each setting of the families, how many times as fast as full gradients its step is
    on some networks with HOSTS hosts, and its accuracy."""
    known = accuracies()
    names = [network.name for network in WIRES]
    lines = [
        "| family | algorithm, after its warm-up | " + " | ".join(names) + " | digits | charlm | bytes |",
        "|---" * (len(names) + 5) + "|",
    ]
    for family, setting in _members():
        times = [step_ms(profile, one, HOSTS, FULL) / step_ms(profile, one, HOSTS, TEXTS[setting]) for one in WIRES]
        cells = [family, f"`{TEXTS[setting]}`", *(f"{value:.2g}" for value in times), *known[setting]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _members():
    for family, names in FAMILIES.items():
        for name in names:
            yield family, name


def compare(report, speeds):
    """A row for each size and codec of a report with one rank per host: measured and predicted milliseconds."""
    hosts = report["settings"]["nnodes"]
    for row in report["rows"]:
        codec = row["system"].removeprefix("bagua").strip()
        cluster = Cluster(parse_network(row["network"]), hosts)
        cost = bucket_cost(row["bytes"], cluster, speeds, Coding(codec) if codec else None)
        predicted = (cost.hold_s + cost.tail_s) * 1e3
        yield {
            "network": row["network"],
            "hosts": hosts,
            "bytes": row["bytes"],
            "codec": codec or "none",
            "measured_ms": row["ms"],
            "predicted_ms": predicted,
            "error": predicted / row["ms"] - 1,
        }


def measured(folder, speeds):
    """A Markdown table of all reports of a folder."""
    rows = [row for file in sorted(folder.glob("*.json")) for row in compare(json.loads(file.read_text()), speeds)]
    rows.sort(key=lambda row: (row["network"], row["bytes"], row["codec"], row["hosts"]))
    lines = ["| network | vector | codec | hosts | measured ms | predicted ms | error |", "|---" * 7 + "|"]
    lines += [
        f"| {row['network']} | {size_text(row['bytes'])} | {row['codec']} | {row['hosts']} | "
        f"{row['measured_ms']:.4g} | {row['predicted_ms']:.4g} | {row['error']:+.0%} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
