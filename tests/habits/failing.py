"""Programs that find something else than under torch's. Whoever mends one removes its line, or names of ways."""

from __future__ import annotations

FAILING: dict[str, tuple[str, str]] = {
    "keeps_gradients": ("with_bagua our_ddp elastic bytegrad", "kept gradients change in the next pass"),
    "sets_data_of_gradients": ("with_bagua our_ddp elastic bytegrad", "replicas drift apart"),
}
"""Ways under which a program fails, and what it finds there."""
