"""All-reduces of two and more emulated hosts beside the model: reports of ``bagua bench allreduce --save``."""

import json

from bagua.bench.units import size_text
from bagua.tuning.network import parse_network
from bagua.tuning.predict import Cluster, Coding, bucket_cost


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


def table(folder, speeds):
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
