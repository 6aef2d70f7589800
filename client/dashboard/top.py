"""``bagua top``: jobs and nodes in a terminal, and one job with its figures, ranks and output, as they change."""

from __future__ import annotations

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
from bagua.base.islands import rank_name
from bagua.base.text import printable, printable_output
from bagua.client.describe import ENDED, island_size
from bagua.dashboard.documents import counts
from bagua.dashboard.feed import Connect, Feeds, JobFeed
from bagua.dashboard.log_tail import LogTail
from bagua.dashboard.top_texts import Row, job_head, job_row, newest_values, node_row, rank_map, step_parts

REFRESH_S = 0.5


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
        """Closes the question with the answer."""
        self.dismiss(event.button.id == "yes")


class JobScreen(Screen[None]):
    """Screen of one job."""

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
        self._feed = self._leave.enter_context(self._feeds.job(self._job_id))
        self._tail = LogTail(self._connect, self._job_id, (), 200)
        self._leave.callback(self._tail.close)
        self.set_interval(REFRESH_S, self.refresh_job)

    def on_unmount(self) -> None:
        self._leave.close()

    def refresh_job(self) -> None:
        feed, tail = self._feed, self._tail
        if feed is None or tail is None:
            return
        with feed.lock:
            job, history = feed.job, feed.history
            now, late = history.now_document(), history.straggler()
            points = list(history.points.points)
            speeds = [point.values["speed"] for point in points if "speed" in point.values]
            shown = history.map_document(len(job.ranks))
        self.title = printable(job.spec.name or job.job_id)
        self.query_one("#head", Static).update(job_head(job, feed.away))
        self.query_one("#values", Static).update(newest_values(now))
        self.query_one("#speed", Sparkline).data = speeds
        self.query_one("#parts", Static).update(step_parts(points[-1].values if points else {}))
        text = rank_map(shown["rows"], shown["ranks_in_row"])
        if late is not None and job.state not in ENDED:
            who = rank_name(late.rank, island_size(job))
            words = f"{who} on {late.node} computes {late.ms:.1f} ms a step, the others {late.median:.1f} ms\n"
            text = Text.assemble((words, "bold red"), text)
        self.query_one("#map", Static).update(text)
        several = len(job.ranks) > 1
        log = self.query_one("#log", RichLog)
        lines, skipped = tail.pop_lines()
        if skipped:
            log.write(Text(f"… {skipped} lines came too fast to be shown …", "yellow"))
        for rank, line in lines:
            found = Text.from_ansi(printable_output(line))
            log.write(Text(f"{rank:>4} ", "dim") + found if several else found)

    def action_cancel(self) -> None:
        """Cancels the job after a question."""
        feed = self._feed
        if feed is None or feed.ended:
            return

        def answer(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._cancel, thread=True, exit_on_error=False)  # the call blocks

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
    """Application with all jobs and nodes. ``connect`` makes a client; ``job_id``: the job that is shown first."""

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
        _fill(self.query_one("#jobs", DataTable), [(job.job_id, job_row(job)) for job in feeds.running + feeds.recent])
        nodes = sorted(feeds.nodes.values(), key=lambda node: node.node_id)
        _fill(self.query_one("#nodes", DataTable), [(node.node_id, node_row(node)) for node in nodes])

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.data_table.id == "jobs" and event.row_key.value and self._feeds is not None:
            self.push_screen(JobScreen(self._feeds, self._connect, event.row_key.value))


def _fill(table: DataTable[Text], rows: Sequence[tuple[str, Row]]) -> None:
    """Changes cells where the rows are the same, else begins anew with the cursor on the same row."""
    keys = [str(row.key.value) for row in table.ordered_rows]
    if keys == [key for key, _ in rows]:
        columns = list(table.columns)
        for key, cells in rows:
            for column, cell in zip(columns, cells, strict=True):
                if table.get_cell(key, column) != cell:  # each change draws the cell again
                    table.update_cell(key, column, cell)
        return
    chosen = keys[table.cursor_row] if 0 <= table.cursor_row < len(keys) else None
    table.clear()
    for key, cells in rows:
        table.add_row(*cells, key=key)
    if chosen in (new := [key for key, _ in rows]):
        table.move_cursor(row=new.index(chosen))
