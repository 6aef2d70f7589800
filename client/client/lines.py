"""Cuts a rank's output into lines for a terminal that several ranks share."""

from __future__ import annotations

# At most one redraw of a user's own progress bar (text that ends with a carriage return) per rank and second.
REDRAW_INTERVAL_S = 1.0

MAX_PARTIAL_BYTES = 64 * 1024  # a line longer than that is cut: output without line ends must not fill the memory


class LineAssembler:
    """Assembles the lines of one rank from chunks of bytes that may end anywhere, also inside a character.

    A text that ends with a carriage return is about to be overwritten (tqdm draws so): of such texts only the newest
    is given out, once per ``REDRAW_INTERVAL_S``. The clock is an argument. Not thread-safe.
    """

    def __init__(self) -> None:
        self._partial = b""
        self._last_redraw = float("-inf")

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines (without their ends) that ``data`` completes at time ``now`` (seconds of any clock)."""
        *whole, self._partial = (self._partial + data).split(b"\n")
        lines = [_last_drawn(line) for line in whole]
        # A carriage return at the very end may be half of a Windows line end: it stays.
        end = len(self._partial.rstrip(b"\r"))
        redrawn, _, rest = self._partial[:end].rpartition(b"\r")
        if redrawn.strip(b"\r"):
            self._partial = rest + self._partial[end:]
            if now - self._last_redraw >= REDRAW_INTERVAL_S:
                self._last_redraw = now
                lines.append(_last_drawn(redrawn))
        if len(self._partial) > MAX_PARTIAL_BYTES:
            lines.append(_decode(self._partial))
            self._partial = b""
        return lines

    def finish(self) -> list[str]:
        """Returns the rest when the rank has ended: zero or one line."""
        partial, self._partial = self._partial, b""
        return [_last_drawn(partial)] if partial.strip() else []


def missing_text(rank: int, count: int) -> str:
    """Tells that ``count`` bytes of a rank's output can't be shown."""
    size = f"{count / (1 << 20):.1f} MiB" if count >= 1 << 20 else f"{count} bytes"
    return (
        f"{size} of the output of rank {rank} are missing here: the log was rotated before they were read. "
        "`bagua daemon --log-max-bytes` and `--log-files` keep more."
    )


def _last_drawn(line: bytes) -> str:
    """The text after the last carriage return: the part of a line that a terminal shows."""
    return _decode(line.rstrip(b"\r").rpartition(b"\r")[2])


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace")
