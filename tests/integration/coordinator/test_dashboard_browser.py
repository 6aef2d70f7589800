"""The dashboard in a real Chromium."""

import httpx
import playwright.sync_api as playwright
import pytest
from rig.coordinator.dashboards import SCRIPT, ReportingJob
from rig.programs import program

WAIT_MS = 60_000
# Without them Chromium asks hosts of its maker at each start.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]


@pytest.fixture(scope="module")
def chromium():
    playwright.expect.set_options(timeout=WAIT_MS)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program("chromium"), args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def elastic(served, peers):
    with served.client() as client:
        made = ReportingJob(client, peers, "elastic", elastic=True)
        yield made
        made.close()


class Tab:
    """One tab. ``errors``: of its scripts, and what its content policy has blocked."""

    def __init__(self, browser, served, **more):
        self.context = browser.new_context(**more)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.errors = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: self.errors.append(line.text) if "Content Security" in line.text else None)
        self.served = served
        self.foreign = []
        self.page.on("request", lambda asked: self._look(asked.url))
        self.page.goto(served.dashboard)

    def _look(self, url):
        if not url.startswith(self.served.dashboard):
            self.foreign.append(url)

    def log_in(self, token=None):
        self.page.fill("input[name=token]", token or self.served.token)
        self.page.click("button[type=submit]")

    def open(self, job):
        self.log_in()
        self.page.click(f"table.jobs a[href*='{job.job_id}']")

    def expect(self, selector):
        return playwright.expect(self.page.locator(selector).first)

    def close(self):
        self.context.close()
        assert not self.errors and not self.foreign


@pytest.fixture
def tab(chromium, served):
    made = Tab(chromium, served)
    yield made
    made.close()


def test_a_wrong_token_is_refused(tab):
    tab.log_in("wrong")
    tab.expect(".login .error").to_contain_text("not the token")
    assert not tab.context.cookies() and tab.page.locator(".tiles").count() == 0
    tab.log_in()
    tab.expect(".tiles").to_contain_text("slots in use")
    (cookie,) = tab.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    assert tab.page.evaluate("document.cookie") == ""
    tab.page.click("#logout")
    tab.expect(".login").to_be_visible()


def test_a_job_is_opened_and_followed_to_its_end(tab, job):
    tab.log_in()
    # Names are text: the script in this one is shown, and does not run.
    tab.expect("table.jobs a").to_have_text(SCRIPT)
    tab.page.click(f"table.jobs a[href*='{job.job_id}']")
    tab.expect("h1").to_have_text(SCRIPT)
    tab.expect("#straggler").to_contain_text("Rank 2 on b computes")
    tab.expect("#heat canvas").to_be_visible()
    tab.expect(".chart canvas").to_be_visible()
    for title in ("loss", "<b>acc</b>", "where a step goes", "bytes moved", "steps per second"):
        tab.expect(f".chart h3:text-is('{title}')").to_be_visible()
    tab.expect("#logs .log").to_contain_text(f"rank 3 says {SCRIPT}")
    job.end()
    tab.expect("h1 + .pill").to_have_text("succeeded")
    tab.expect("#logs .log").to_contain_text("the end")
    tab.expect("#straggler").to_be_hidden()
    assert tab.page.locator("#cancel").count() == 0
    assert tab.page.title() == f"{SCRIPT} · Bagua"
    assert tab.page.locator("main img, main script").count() == 0


def test_a_hidden_tab_asks_for_nothing_and_catches_up(tab, job):
    def hide(hidden):
        tab.page.evaluate(
            """(hidden) => {
                Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
                document.dispatchEvent(new Event("visibilitychange"));
            }""",
            hidden,
        )

    tab.log_in()
    tab.expect(f"section:has(h2:text-is('Jobs')) a[href*='{job.job_id}']").to_be_visible()
    tab.expect("#live").to_have_text("live")
    hide(True)
    tab.expect("#live").to_have_text("paused")
    job.end()
    hide(False)
    tab.expect("#live").to_have_text("live")
    tab.expect(f"section:has(h2:text-is('Ended')) a[href*='{job.job_id}']").to_be_visible()


def test_the_straggler_is_the_red_line_of_the_map(tab, job):
    tab.open(job)
    tab.expect("#straggler").to_be_visible()
    tab.expect("#heat canvas").to_be_visible()
    # The colour in the middle of each line's first cell, once all ranks have reported.
    colours = tab.page.wait_for_function("""() => {
        const canvas = document.querySelector("#heat canvas"), scale = devicePixelRatio || 1;
        const pen = canvas.getContext("2d");
        const seen = [0, 1, 2, 3].map((rank) => [...pen.getImageData(60 * scale, (rank * 22 + 11) * scale, 1, 1).data]);
        return seen.every((pixel) => pixel[3]) && seen;
    }""").json_value()
    red, green, blue, _ = colours[2]
    assert red > 2 * max(green, blue), colours
    assert colours[0] == colours[1] == colours[3] and colours[0][2] > colours[0][0], colours


def test_the_timeline_of_one_step(tab, job):
    """Of steps that real ranks and hosts have recorded: a row of each, and what a span is."""
    tab.open(job)
    tab.expect("#timeline canvas").to_be_hidden()
    tab.page.click("#record")
    tab.expect("#timeline canvas").to_be_visible()
    tab.expect("#record").to_have_text("Record another")
    for phase in ("forward", "backward", "submitted", "reduced", "reduce", "send", "receive"):
        tab.expect(f"#timeline .legend span:text-is('{phase}')").to_be_visible()
    with httpx.Client(base_url=tab.served.dashboard, headers={"authorization": f"Bearer {tab.served.token}"}) as client:
        answer = client.post(f"/api/jobs/{job.job_id}/trace", headers={"x-bagua-dashboard": "1"}, json={})
    lanes = answer.json()["lanes"]
    assert {lane[0] for lane in lanes} == {f"rank {rank} ({'ab'[rank // 2]})" for rank in range(4)} | {
        "host a",
        "host b",
    }
    row = next(row for row, lane in enumerate(lanes) if lane[:2] == ["rank 2 (b)", "bucket 0"])
    begin, length, _, _ = max(lanes[row][2], key=lambda span: span[1])
    canvas = tab.page.locator("#timeline canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    end = max(span[0] + span[1] for lane in lanes for span in lane[2])
    left = min(190, box["width"] * 0.32)
    x = left + (begin + length / 2) * (box["width"] - left - 10) / end
    canvas.hover(position={"x": x, "y": 20 + row * 17 + 8})
    tab.expect(".tip").to_contain_text("rank 2 (b): bucket 0")
    tab.expect(".tip").to_contain_text(" ms, from ")


def test_cancel_asks_first(tab, job):
    tab.open(job)
    tab.page.click("#cancel")
    tab.expect("dialog").to_contain_text("Cancel this job?")
    tab.page.click("dialog button:text('Back')")
    tab.expect("h1 + .pill").to_have_text("running")
    tab.page.click("#cancel")
    tab.page.click("#confirm")
    tab.expect("h1 + .pill").to_have_text("cancelled")
    tab.expect("#again").to_be_enabled()


def test_submit_again_asks_first(tab, job, peers):
    """Refused, nothing is submitted. Confirmed, a job with the same specification is, and the page goes to it."""
    tab.open(job)
    job.close()
    tab.expect("h1 + .pill").to_have_text("succeeded")
    asked = []
    tab.page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
    with tab.served.client() as client:
        before = {one.job_id for one in client.list()}
        tab.page.click("#again")
        tab.expect("dialog").to_contain_text("Submit this job again?")
        tab.expect("dialog").to_contain_text("2 nodes × 2 ranks")
        tab.page.click("dialog button:text('Back')")
        tab.expect("dialog").to_be_hidden()
        tab.page.click("#again")
        tab.page.keyboard.press("Escape")
        tab.expect("dialog").to_be_hidden()
        tab.page.click("#again")
        assert not asked and {one.job_id for one in client.list()} == before
        tab.page.click("#confirm")
        tab.page.wait_for_function("(id) => !location.hash.includes(id)", arg=job.job_id)
        assert len(asked) == 1
        (made,) = {one.job_id for one in client.list()} - before
        assert tab.page.evaluate("location.hash") == f"#/jobs/{made}"
        tab.expect("h1").to_have_text(SCRIPT)
        old, new = client.get(job.job_id).spec, client.get(made).spec
        assert (list(new.args), new.nnodes, new.nproc_per_node) == (list(old.args), 2, 2)
        ReportingJob(client, peers, SCRIPT, job_id=made).close()


def test_membership_shows_a_rank_that_is_lost(tab, elastic):
    """A line for each generation, the newest first: since when, how long, and why."""
    tab.open(elastic)
    rows = tab.page.locator("#members tr")
    tab.expect("#members h3").to_have_text("Membership")
    playwright.expect(rows).to_have_count(1)
    playwright.expect(rows).to_contain_text("now")
    elastic.lose_last()
    playwright.expect(rows).to_have_count(2)
    newest, first = rows.nth(0), rows.nth(1)
    assert [row.locator("b").inner_text() for row in (newest, first)] == ["2", "1"]
    for words in ("now", "rank 3"):
        playwright.expect(newest).to_contain_text(words)
    playwright.expect(first).to_contain_text("for ")


def test_a_phone_in_the_dark(chromium, served, job):
    tab = Tab(chromium, served, color_scheme="dark", viewport={"width": 375, "height": 700}, has_touch=True)
    tab.log_in()
    tab.expect("table.jobs a").to_be_visible()
    tab.page.click(f"table.jobs a[href*='{job.job_id}']")
    tab.expect(".chart canvas").to_be_visible()
    wide = tab.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 375, "the page scrolls sideways"
    back = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == "rgb(15, 18, 25)"
    tab.close()
