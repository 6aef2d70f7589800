"""The place where the output of a launch appears: the cell of a notebook, or a terminal."""

from __future__ import annotations

import html
import sys
from typing import Any

WIDTH = "40ex"


class Bar:
    """Progress of the training, as IPython displays it."""

    def __init__(self, step: int, total: int, words: str) -> None:
        self._step, self._total, self._words = step, total, words

    def __repr__(self) -> str:
        return f"{self._step}/{self._total} {self._words}".rstrip()

    def _repr_html_(self) -> str:
        bar = f"<progress style='width:{WIDTH}' max='{self._total}' value='{self._step}'></progress>"
        return f"{bar} {html.escape(repr(self))}"


class Cell:
    """Shows text and progress of one launch."""

    def __init__(self) -> None:
        self._display = _find_display()
        self._handle: Any = None
        self._on_terminal = self._display is None and sys.stderr.isatty()
        self._line = 0  # length of the progress line that stands on the terminal

    def write(self, text: str) -> None:
        """Shows output of rank 0."""
        self._clear()
        sys.stdout.write(text)
        sys.stdout.flush()

    def progress(self, step: int, total: int, metrics: dict[str, float], message: str) -> None:
        """The newest report. ``total`` 0: nobody knows."""
        words = " ".join([*(f"{name} {value:.4g}" for name, value in metrics.items()), message]).strip()
        bar = Bar(step, total or max(step, 1), words)  # nobody knows how many there will be: the bar is full
        if self._handle is not None:
            self._handle.update(bar)
        elif self._display is not None:
            self._handle = self._display(bar, display_id=True)
        elif self._on_terminal:
            self._clear()
            self._line = len(repr(bar))
            sys.stderr.write(repr(bar))
            sys.stderr.flush()

    def close(self) -> None:
        """Shows that the launch has ended."""
        if self._line:
            sys.stderr.write("\n")
            self._line = 0

    def _clear(self) -> None:
        if self._line:
            sys.stderr.write("\r" + " " * self._line + "\r")
            self._line = 0


def _find_display() -> Any:
    """IPython's ``display`` in a notebook; None elsewhere."""
    # Not imported here: only a notebook has it.
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or getattr(shell, "kernel", None) is None:  # a terminal's IPython has no kernel, and shows no HTML
        return None
    from IPython.display import display

    return display
