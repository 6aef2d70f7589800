"""``bagua top``: jobs and nodes in a terminal, and one job with its figures, ranks and output, as they change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Button, DataTable, Footer, Header, Label, RichLog, Sparkline, Static

from bagua.base.errors import BaguaError
from bagua.base.text import printable, printable_output
from bagua.client.describe import duration, job_state
from bagua.dashboard.documents import counts
from bagua.dashboard.feed import ENDED, Connect, Feeds, JobFeed, LogTail
from bagua.proto import job_pb2

REFRESH_S = 0.5
MAX_ROWS = 40  # ranks of a map
COLUMNS = 60
_COLOURS = {"running": "blue", "succeeded": "green", "failed": "red", "cancelled": "yellow", "pending": "grey62"}
_PARTS = (
    ("compute", "blue", "computation"),
    ("hidden", "green", "hidden"),
    ("ranks", "yellow", "waits for ranks"),
    ("exposed", "red", "exposed"),
)
_HEAT = ("grey30", "royal_blue1", "dark_orange", "red1")


class Confirm(ModalScreen[bool]):
    """Asks a question; escape is no."""

    CSS = """
    Confirm { align: center middle; }
    Confirm > Vertical { width: 60; height: auto; border: round $error; padding: 1 2; background: $surface; }
    Confirm Horizontal { height: auto; align: right middle; margin-top: 1; }
    Confirm Button { margin-left: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss(False)", "Back")]

    def __init__(self, question: str, yes: str) -> None:
        super().__init__()
        self._question, self._yes = question, yes

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(Text(self._question))
            with Horizontal():
                yield Button("Back", id="no")
                yield Button(self._yes, id="yes", variant="error")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """One of the two."""
        self.dismiss(event.button.id == "yes")


class JobScreen(Screen[None]):
    """One job."""

    CSS = """
    JobScreen Static { height: auto; padding: 0 1; }
    #figures { height: auto; max-height: 70%; }
    .chart { height: 3; margin: 0 1; }
    #log { height: 1fr; min-height: 6; border-top: solid $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "app.pop_screen", "Back"),
        ("c", "cancel", "Cancel the job"),
        ("q", "app.quit", "Quit"),
    ]

    def __init__(self, feeds: Feeds, connect: Connect, job_id: str) -> None:
        super().__init__()
        self._feeds, self._connect, self._job_id = feeds, connect, job_id
        self._leave = ExitStack()
        self._feed: JobFeed | None = None
        self._tail: LogTail | None = None

    def compose(self) -> ComposeResult:
        yield Header(show_clock=True)
        with VerticalScroll(id="figures"):
            yield Static(id="head")
            yield Static(id="values")
            yield Sparkline([], classes="chart", id="speed")
            yield Static(id="parts")
            yield Static(id="map")
        yield RichLog(id="log", max_lines=2_000, wrap=True)
        yield Footer()

    def on_mount(self) -> None:
        """Begins to look."""
        self._feed = self._leave.enter_context(self._feeds.job(self._job_id))
        self._tail = LogTail(self._connect, self._job_id, (), 200)
        self._leave.callback(self._tail.close)
        self.set_interval(REFRESH_S, self.refresh_job)

    def on_unmount(self) -> None:
        """Ends what was begun."""
        self._leave.close()

    def refresh_job(self) -> None:
        """Shows what there is now."""
        feed, tail = self._feed, self._tail
        if feed is None or tail is None:
            return
        with feed.lock:
            job, history = feed.job, feed.history
            now, late = history.now_document(), history.straggler()
            points = list(history.points.points)
            shown = history.ranks.document(len(job.ranks))
        self.title = printable(job.spec.name or job.job_id)
        self.query_one("#head", Static).update(_head(job, feed.away))
        self.query_one("#values", Static).update(_values(now))
        self.query_one("#speed", Sparkline).data = [values["speed"] for _, values in points if "speed" in values]
        self.query_one("#parts", Static).update(_parts(points[-1][1] if points else {}))
        text = rank_map(shown["rows"], shown["ranks_in_row"])
        if late is not None and job.state not in ENDED:
            words = (
                f"rank {late.rank} on {late.node} computes {late.ms:.1f} ms a step, the others {late.median:.1f} ms\n"
            )
            text = Text.assemble((words, "bold red"), text)
        self.query_one("#map", Static).update(text)
        several = len(job.ranks) > 1
        log = self.query_one("#log", RichLog)
        lines, skipped = tail.take()
        if skipped:
            log.write(Text(f"… {skipped} lines came too fast to be shown …", "yellow"))
        for rank, line in lines:
            found = Text.from_ansi(printable_output(line))
            log.write(Text(f"{rank:>4} ", "dim") + found if several else found)

    def action_cancel(self) -> None:
        """After a question."""
        feed = self._feed
        if feed is None or feed.ended:
            return

        def answer(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._cancel, thread=True, exit_on_error=False)

        name = printable(feed.job.spec.name or self._job_id)
        self.app.push_screen(
            Confirm(f"Cancel {name}? Work since the last checkpoint is lost.", "Cancel the job"), answer
        )

    def _cancel(self) -> None:
        try:
            with self._connect() as client:
                client.cancel(self._job_id, reason="cancelled in bagua top")
        except BaguaError as error:
            self.app.call_from_thread(self.notify, str(error), severity="error")


class Top(App[None]):
    """All jobs and nodes. ``connect`` makes a client; ``job_id``: the job that is shown first."""

    TITLE = "bagua top"
    CSS = """
    #summary { height: 1; padding: 0 1; }
    #jobs { height: 2fr; }
    #nodes { height: 1fr; border-top: solid $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit")]

    def __init__(self, connect: Connect, job_id: str = "") -> None:
        super().__init__()
        self._connect, self._first = connect, job_id
        self._feeds: Feeds | None = None
        self._leave = ExitStack()
        self._version = -1

    def compose(self) -> ComposeResult:
        yield Header(show_clock=True)
        yield Static(id="summary")
        yield DataTable(id="jobs", cursor_type="row", zebra_stripes=True)
        yield DataTable(id="nodes", cursor_type="none")
        yield Footer()

    def on_mount(self) -> None:
        """Begins to look."""
        self.query_one("#jobs", DataTable).add_columns("job", "name", "state", "progress", "ranks", "since", "reason")
        self.query_one("#nodes", DataTable).add_columns("node", "slots", "used", "state", "address", "version")
        self._feeds = Feeds(self._connect)
        self._leave.callback(self._feeds.close)
        self._leave.enter_context(self._feeds.cluster())
        self.set_interval(REFRESH_S, self.refresh_cluster)
        self.query_one("#jobs", DataTable).focus()
        if self._first:
            self.push_screen(JobScreen(self._feeds, self._connect, self._first))

    def on_unmount(self) -> None:
        """Ends what was begun."""
        self._leave.close()

    def refresh_cluster(self) -> None:
        """Shows what there is now. The cursor stays on its job."""
        feeds = self._feeds
        if feeds is None or feeds.version == self._version:
            return
        self._version = feeds.version
        found = counts(feeds.nodes.values(), feeds.running)
        summary = (
            f"{found['connected']} of {found['nodes']} nodes   {found['used']} of {found['slots']} slots   "
            f"{found['running']} running   {found['pending']} pending"
        )
        self.query_one("#summary", Static).update(Text(feeds.away or summary, "red" if feeds.away else "bold"))
        _fill(self.query_one("#jobs", DataTable), [(job.job_id, _job_row(job)) for job in feeds.running + feeds.recent])
        nodes = sorted(feeds.nodes.values(), key=lambda node: node.node_id)
        _fill(self.query_one("#nodes", DataTable), [(node.node_id, _node_row(node)) for node in nodes])

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Shows the job."""
        if event.data_table.id == "jobs" and event.row_key.value and self._feeds is not None:
            self.push_screen(JobScreen(self._feeds, self._connect, event.row_key.value))


Row = tuple[Text, ...]


def _fill(table: DataTable[Text], rows: Sequence[tuple[str, Row]]) -> None:
    """Changes cells where the rows are the same, else begins anew with the cursor on the same row."""
    keys = [str(row.key.value) for row in table.ordered_rows]
    if keys == [key for key, _ in rows]:
        columns = list(table.columns)
        for key, cells in rows:
            for column, cell in zip(columns, cells, strict=True):
                if table.get_cell(key, column) != cell:
                    table.update_cell(key, column, cell)
        return
    chosen = keys[table.cursor_row] if 0 <= table.cursor_row < len(keys) else None
    table.clear()
    for key, cells in rows:
        table.add_row(*cells, key=key)
    if chosen in (new := [key for key, _ in rows]):
        table.move_cursor(row=new.index(chosen))


def _text(words: object, style: str = "", most: int = 60) -> Text:
    shown = printable(str(words))
    return Text(shown if len(shown) <= most else shown[: most - 1] + "…", style)


def _job_row(job: job_pb2.Job) -> Row:
    state = job_state(job.state)
    progress = job.progress if job.HasField("progress") else None
    steps = "" if progress is None else f"{progress.step}/{progress.total}" if progress.total else str(progress.step)
    seconds = (job.finished_at or time.time()) - job.created_at
    return (
        _text(job.job_id, "dim"),
        _text(job.spec.name, "bold", 32),
        _text(state, _COLOURS.get(state, "yellow")),
        _text(steps),
        _text(job.spec.nnodes * job.spec.nproc_per_node),
        _text(duration(max(0.0, seconds))),
        _text("" if state in ("running", "succeeded") else job.reason),
    )


def _node_row(node: job_pb2.Node) -> Row:
    state = "away" if not node.connected else "draining" if node.draining else "connected"
    style = {"away": "red", "draining": "yellow"}.get(state, "green")
    texts = (node.slots, node.used_slots)
    return (
        _text(node.node_id),
        *(_text(one) for one in texts),
        _text(state, style),
        _text(node.address),
        _text(node.version, "dim"),
    )


def _head(job: job_pb2.Job, away: str) -> Text:
    state = job_state(job.state)
    text = Text(f"{job.job_id}  ", "dim") + Text(state, f"bold {_COLOURS.get(state, 'yellow')}")
    text += Text(f"  {job.spec.nnodes} × {job.spec.nproc_per_node} ranks  generation {job.generation}")
    for words, style in ((job.reason, ""), (job.waiting, "yellow"), (away, "red")):
        if words:
            text += Text("\n" + printable(words), style)
    return text


def _values(now: dict[str, object]) -> Text:
    if now["step"] is None:
        return Text("no figures yet", "dim")
    text = Text.assemble((f"step {now['step']}" + (f" of {now['total']}" if now["total"] else ""), "bold"))
    if now["speed"]:
        text += Text(f"   {now['speed']:.4g} steps/s")
    metrics = now["metrics"]
    assert isinstance(metrics, dict)
    for name, value in metrics.items():
        text += Text(f"   {printable(name)} ", "dim") + Text("nan" if value is None else f"{value:.4g}")
    return text + Text("\nsteps per second since the job was first seen", "dim")


def _parts(values: dict[str, float]) -> Text:
    """A bar: how a step divides."""
    found = [(values[name], colour, words) for name, colour, words in _PARTS if values.get(name)]
    total = sum(value for value, _, _ in found)
    if not total:
        return Text("")
    text = Text("")
    for value, colour, _ in found:
        text += Text("█" * max(1, round(COLUMNS * value / total)), colour)
    text += Text(f"  {total:.4g} ms a step\n")
    for value, colour, words in found:
        text += Text("■ ", colour) + Text(f"{words} {value:.3g} ms   ")
    return text


def rank_map(rows: Sequence[Sequence[float | None]], ranks_in_row: int) -> Text:
    """A line for each rank: dark as the median of its column, red where it computes twice as long."""
    text = Text("")
    if len(rows) < 2:
        return text
    first = max(0, len(rows[0]) - COLUMNS)
    for number, row in enumerate(rows[:MAX_ROWS]):
        text += Text(f"{number * ranks_in_row:>5} ", "dim")
        for column in range(first, len(row)):
            text += _cell(row[column], sorted(value for one in rows if (value := one[column]) is not None))
        text += Text("\n")
    hidden = len(rows) - MAX_ROWS
    return text + Text(f"      … and {hidden} more lines\n", "dim") if hidden > 0 else text


def _cell(value: float | None, column: Sequence[float]) -> Text:
    if value is None:
        return Text(" ")
    ratio = value / (column[(len(column) - 1) // 2] or value or 1.0)
    return Text("█", _HEAT[(ratio > 1.15) + (ratio > 1.4) + (ratio > 1.8)])
