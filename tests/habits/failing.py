"""Programs that find something else than under torch's, by reason, and the ways under which they do.

Whoever mends one is told so by pytest ("[XPASS(strict)]"), and removes its line here, or names of ways.
``pytest tests/habits --runxfail`` shows what each finds."""

from __future__ import annotations

FAILING: dict[str, dict[str, str]] = {
    "torch's DDP loses gradients: ours are those of one process": {
        "goes_to_double_and_back": "with_bagua our_ddp elastic",
        "is_evaluated_in_half": "with_bagua our_ddp elastic",
        "changes_memory_format": "with_bagua our_ddp elastic",
    },
}
