"""Daemons that do nothing."""

import time

from .report import Row, console
from .way import Coordinator


def beats(options, folder):
    """Daemons that do nothing."""
    with Coordinator(folder / "beats", way=options.way) as coordinator, coordinator.fleet(options.hosts) as fleet:
        console.print(f"{options.hosts} daemons connect …")
        fleet.wait_connected(options.limit_s)
        # Their arrival is over, and acknowledgements (every 15 s) have told all of them how often to speak.
        time.sleep(options.settle_s)
        cpu, began = coordinator.cpu_s(), time.monotonic()
        time.sleep(options.beat_s)
        share = (coordinator.cpu_s() - cpu) / (time.monotonic() - began)
        note = f"over {options.beat_s:g} s; streams that broke: {fleet.counts().broken}"
        yield Row(f"heartbeats of {options.hosts:,} daemons, of a core", 100 * share, "%", "10 %", note, least=0.5)
