"""Figures, and how they look beside each other."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

MOST_TIMES = 2.0
"""The cost of all that protects a service, in times of a service without it."""
RATE = "jobs/s"

console = Console(stderr=True)


@dataclass(frozen=True)
class Row:
    """A figure. ``target``: what it is held against, in words; empty: it is only told. ``least``: amounts below that
    can't be told apart, as between two looks at a state."""

    what: str
    amount: float
    unit: str
    target: str
    note: str = ""
    least: float = 0.0

    @property
    def value(self):
        """As people read it."""
        digits = {"s": 2, "ms": 1, RATE: 1, "%": 1}.get(self.unit, 0)
        return f"{self.amount:,.{digits}f} {self.unit}"


@dataclass(frozen=True)
class Compared:
    """A figure without and with. ``times``: how much dearer; nan: there is nothing to compare."""

    what: str
    plain: Row
    other: Row

    @property
    def times(self):
        """Fewer jobs a second are dearer."""
        plain, other = (max(row.amount, row.least) for row in (self.plain, self.other))
        if self.plain.unit == RATE:
            plain, other = other, plain
        return other / plain if plain else math.nan

    @property
    def verdict(self):
        """Whether it is wanted so."""
        return "?" if math.isnan(self.times) else "yes" if self.times <= MOST_TIMES else "NO"


def compared(plain, other):
    """The figures that are in both."""
    before = {row.what: row for row in plain}
    return [Compared(row.what, before[row.what], row) for row in other if row.what in before]


def quantile(values, part):
    """The value below which ``part`` of ``values`` lie."""
    return sorted(values)[min(len(values) - 1, math.ceil(part * len(values)) - 1)]


@contextmanager
def bar(what, total):
    """A progress bar on stderr: call it with how many are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def tables(found):
    """One for each way; then one that compares the two, if there are two."""
    for name, rows in found.items():
        table = Table("", "here", "target", "", title=name)
        for row in rows:
            table.add_row(row.what, row.value, row.target, row.note)
        yield table
    if len(found) == 2:
        (first, plain), (second, other) = found.items()
        table = Table("", first, second, "times", f"at most {MOST_TIMES:g}?")
        for one in compared(plain, other):
            table.add_row(one.what, one.plain.value, one.other.value, f"{one.times:.2f}", one.verdict)
        yield table
