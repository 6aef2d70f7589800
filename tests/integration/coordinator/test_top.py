"""``bagua top`` over a real coordinator, driven by Textual's pilot."""

import asyncio
import time

from textual.widgets import Button, DataTable, RichLog, Static

from bagua.dashboard.top import Confirm, JobScreen, Top
from bagua.dashboard.top_texts import rank_map
from bagua.proto import common_pb2 as c

WAIT_S = 60.0


async def until(pilot, condition, key=""):
    """Waits; presses ``key`` every second meanwhile: a key that comes while a dialog closes is lost, as for people."""
    deadline, pressed = time.monotonic() + WAIT_S, -1.0
    while not condition():
        now = time.monotonic()
        if now > deadline:
            texts = [str(static.render()) for static in pilot.app.screen.query(Static)]
            raise AssertionError(f"still {pilot.app.screen!r}: {texts}")
        if key and now - pressed > 1.0:
            pressed = now
            await pilot.press(key)
        else:
            await pilot.pause(0.05)


def shown(screen, name):
    return str(screen.query_one(name, Static).render())


async def test_from_the_list_to_a_job_and_its_cancellation(served, job):
    app = Top(served.client)
    async with app.run_test(size=(120, 50)) as pilot:
        jobs = app.query_one("#jobs", DataTable)
        await until(pilot, lambda: jobs.row_count == 1 and app.query_one("#nodes", DataTable).row_count == 2)
        assert "2 of 2 nodes   4 of 4 slots   1 running" in shown(app.screen, "#summary")
        await until(pilot, lambda: isinstance(app.screen, JobScreen), "enter")
        screen = app.screen
        await until(pilot, lambda: "rank 2 on b computes" in shown(screen, "#map"))
        assert "loss" in shown(screen, "#values") and "computation" in shown(screen, "#parts")
        log = screen.query_one("#log", RichLog)
        await until(pilot, lambda: any("rank 3 says <img" in line.text for line in log.lines))
        await until(pilot, lambda: isinstance(app.screen, Confirm), "c")
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is screen)
        await until(pilot, lambda: isinstance(app.screen, Confirm), "c")
        app.screen.query_one("#yes", Button).press()
        await until(pilot, lambda: "cancelled" in shown(screen, "#head"))
        await until(pilot, lambda: app.screen is not screen, "escape")
    with served.client() as client:
        found = await asyncio.to_thread(client.get, job.job_id)
        assert found.state == c.JOB_STATE_CANCELLED and "bagua top" in found.reason


def test_the_map_names_its_lines_and_colours_a_straggler():
    text = rank_map([[10.0, 10.0], [30.0, None], [10.0, 11.0]], 1)
    lines = text.plain.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]
    assert lines[1].endswith("█ ")
    styles = {str(span.style) for span in text.spans}
    assert "red1" in styles and "grey30" in styles
    assert rank_map([[1.0]], 1).plain == ""
    assert "60 more lines" in rank_map([[1.0]] * 100, 1).plain
