"""Step times beside the accuracy of docs/accuracy.md, for the same settings."""

from pathlib import Path

from bagua.bench import accuracy
from bagua.tuning.network import Network
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
