"""The dashboard with 1,000 nodes, 300 jobs that run and 10,000 that have ended: what a tab gets stays small and comes
in pages, and a browser shows it without being slow."""

import playwright.sync_api as playwright
import pytest
from rig.coordinator.fleet import FleetProcess
from rig.coordinator.old_jobs import insert_old_jobs
from rig.programs import program

from bagua.proto import common_pb2 as c

NODES, JOBS = 1_000, 10_000
CONNECTED_S = 240.0  # a thousand handshakes
FOR_MANY = {
    "BAGUA_COORDINATOR_HEARTBEAT_S": "3",
    "BAGUA_COORDINATOR_LEASE_S": "60",
    "BAGUA_COORDINATOR_FENCE_AFTER": "60",
}
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


RUNNING = 300
FIGURES = """() => ({
    wide: document.documentElement.scrollWidth <= innerWidth,
    high: document.documentElement.scrollHeight,
})"""


def test_a_large_cluster_in_a_browser(start, tmp_path):
    chromium = program("chromium")
    state = tmp_path / "state"
    start(state_dir=state).end()
    spec = c.JobSpec(name="old", entry="/bin/true", no_python=True, nnodes=1, nproc_per_node=1)
    insert_old_jobs(state / "coordinator" / "bagua.db", spec, JOBS, lambda count: None)
    process = start("--dashboard", "127.0.0.1:0", state_dir=state, **FOR_MANY)
    with FleetProcess(process.address, process.token, NODES, 2) as fleet, process.client() as client:
        fleet.wait_connected(CONNECTED_S)
        for number in range(RUNNING):
            spec = c.JobSpec(name=f"train-{number}", entry="t", no_python=True, nnodes=1 + number % 4, nproc_per_node=2)
            client.submit(spec)
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            for width, height in ((1280, 900), (390, 800)):
                page = browser.new_page(viewport={"width": width, "height": height})
                page.set_default_timeout(60_000)
                page.goto(process.dashboard)
                page.fill("input[name=token]", process.token)
                page.click("button[type=submit]")
                tiles = playwright.expect(page.locator(".tiles"))
                tiles.to_contain_text("1000", timeout=60_000)
                tiles.to_contain_text(f"{RUNNING}", timeout=60_000)
                playwright.expect(page.locator("canvas[aria-label='1000 nodes']")).to_be_visible(timeout=60_000)
                playwright.expect(page.locator("table.jobs").nth(1)).to_be_visible(timeout=60_000)
                found = page.evaluate(FIGURES)
                assert found["wide"] and found["high"] < 6_000, found
                page.close()
            browser.close()
