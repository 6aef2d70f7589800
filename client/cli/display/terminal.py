"""The output of a running job: its ranks' lines, a progress bar on a terminal, plain lines elsewhere.

Ranks' lines go to standard output; everything of ours (status, progress, summary) goes to standard error, except on a
terminal, where one console draws both so that the bar tears no line. Used from one thread only.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from bagua.base.text import printable, printable_output

if TYPE_CHECKING:
    from bagua.proto import common_pb2

PLAIN_INTERVAL_S = 2.0  # seconds between two progress lines where there is no terminal
ADVANCE_INTERVAL_S = 10.0  # the same, before training begins


def metrics_text(metrics: dict[str, float]) -> str:
    """``acc 0.98  loss 0.0123``: by name (the protocol keeps no order), four significant digits."""
    return "  ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()))


class Terminal:
    """Plain lines; the base of the one with a bar. ``aside``: the ranks' lines go to standard error, too."""

    def __init__(self, quiet: bool = False, aside: bool = False) -> None:
        self.quiet = quiet
        self.aside = aside
        self._status = ""
        self._shown_at = float("-inf")
        self._advanced_at = float("-inf")
        self._pending = ""

    def line(self, text: str) -> None:
        """A line of a rank."""
        output = sys.stderr if self.aside else sys.stdout
        output.write((printable_output(text) if output.isatty() else text) + "\n")
        output.flush()  # into a file or a pipe, too: somebody may follow it

    def status(self, text: str) -> None:
        """Shows what the job is doing, when that changes."""
        if text != self._status:
            self._status = text
            self.note(text)

    def away(self, why: str) -> None:
        """Shows that the coordinator does not answer, and is waited for."""
        self.status(f"waiting for the coordinator: {why}")

    def advance(self, text: str) -> None:
        """Shows how far something is that takes its time. It is told again and again, and shown now and then."""
        if time.monotonic() - self._advanced_at >= ADVANCE_INTERVAL_S:
            self._advanced_at = time.monotonic()
            self.status(text)

    def passing(self, text: str) -> None:
        """A short-lived status: shown only where the next status takes its place."""

    def note(self, text: str) -> None:
        """Prints a line of Bagua's own."""
        if text and not self.quiet:
            self.error(text)

    def error(self, text: str) -> None:
        """A line of ours that --quiet does not silence."""
        sys.stderr.write(printable(text, lines=True) + "\n")
        sys.stderr.flush()

    def progress(self, progress: common_pb2.Progress) -> None:
        """A report of the training script."""
        steps = f"step {progress.step}/{progress.total}" if progress.total else f"step {progress.step}"
        self._pending = "  ".join(filter(None, (steps, metrics_text(dict(progress.metrics)), progress.message)))
        # The last one is shown in any case.
        if progress.step >= progress.total > 0 or time.monotonic() - self._shown_at >= PLAIN_INTERVAL_S:
            self._show_pending()

    def close(self) -> None:
        """Shows the last report, if it was held back. Call once, before the summary."""
        self._show_pending()

    def _show_pending(self) -> None:
        if self._pending:
            self._shown_at = time.monotonic()
            self.note(self._pending)
            self._pending = ""


class BarTerminal(Terminal):
    """A terminal with a progress bar at the bottom; the ranks' lines scroll above it."""

    def __init__(self, aside: bool = False) -> None:
        super().__init__(aside=aside)
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.table import Column

        from bagua.cli.display.cut_column import CutColumn

        # The ranks' lines may go to a file while the bar is on the terminal.
        self._shared = sys.stdout.isatty() or aside
        self._console = Console(stderr=aside or not self._shared, highlight=False)
        self._bar = Progress(
            SpinnerColumn(table_column=Column(no_wrap=True)),
            CutColumn("description"),
            BarColumn(bar_width=30, table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[steps]}", markup=False),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            CutColumn("metrics", style="cyan"),
            console=self._console,
            transient=True,
            redirect_stdout=False,  # else rich draws on the terminal what goes to a file
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=None, steps="", metrics="")
        self._bar.start()

    def line(self, text: str) -> None:
        if self._shared:
            from rich.text import Text

            self._console.print(Text.from_ansi(printable_output(text)), soft_wrap=True)  # rich would break long lines
        else:
            super().line(text)

    def status(self, text: str) -> None:
        self._bar.update(self._task, description=printable(text))

    def advance(self, text: str) -> None:
        self.status(text)

    def passing(self, text: str) -> None:
        self.status(text)

    def error(self, text: str) -> None:
        self._console.print(printable(text, lines=True), markup=False, soft_wrap=True)

    def progress(self, progress: common_pb2.Progress) -> None:
        steps = f"{progress.step}/{progress.total}" if progress.total else f"step {progress.step}"
        extra = printable("  ".join(filter(None, (metrics_text(dict(progress.metrics)), progress.message))))
        self._bar.update(self._task, completed=progress.step, total=progress.total or None, steps=steps, metrics=extra)

    def close(self) -> None:
        self._bar.stop()


def open_terminal(quiet: bool, aside: bool = False) -> Terminal:
    """A bar if standard error is a terminal that can draw one, plain lines otherwise or when ``quiet``. ``aside``:
    nothing goes to standard output."""
    import os

    if quiet or not sys.stderr.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return Terminal(quiet, aside)
    return BarTerminal(aside)
