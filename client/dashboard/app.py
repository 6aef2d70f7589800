"""The server of the page: what each path answers. Everything but the page itself and the login needs a session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bagua.base.errors import (
    BaguaError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    TooMuchError,
    UnavailableError,
)
from bagua.base.text import json_text
from bagua.client import Client
from bagua.client.describe import ENDED
from bagua.dashboard.access import Access
from bagua.dashboard.documents import job_row, no_again
from bagua.dashboard.feed import Connect, Feeds
from bagua.dashboard.guests import Guests
from bagua.dashboard.log_tail import LogTail
from bagua.dashboard.stream import ClusterView, JobView, events
from bagua.proto import common_pb2, job_pb2
from bagua.timeline import chrome

STATIC = Path(__file__).resolve().parent / "static"  # an editable installation has links
MAX_BODY = 64 << 10
MAX_TABS = 100
TOO_MANY = "Too many wrong tokens. Wait a minute."
TRACED_STEPS = 3  # recorded; the one in the middle is shown
TRACE_S = 30.0
MAX_SPANS = 6_000
MAX_LANES = 120
LOG_TAIL = 300  # lines of each rank that a tab begins with
_HEADERS = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)
_STATUS: tuple[tuple[type[BaguaError], int], ...] = (
    (NotFoundError, 404),
    (InvalidRequestError, 400),
    (ConflictError, 409),
    (TooMuchError, 429),
    (UnavailableError, 503),
)

Handler = Callable[[Request], Awaitable[Response]]


class Document(JSONResponse):
    """JSON as ``bagua.base.text`` writes it, never kept by a browser."""

    def __init__(self, content: Any, status: int = 200) -> None:
        super().__init__(content, status, {"cache-control": "no-store"})

    def render(self, content: Any) -> bytes:
        return json_text(content).encode()


def refusal(status: int, words: str) -> Document:
    """An error as the page shows it."""
    return Document({"error": words}, status)


class Headers:
    """Adds the headers that keep the page to itself, and refuses a foreign name in Host."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in _HEADERS),
                ]
            await send(message)

        request = Request(scope)
        if self._access.right_host(request):
            await self._app(scope, receive, with_headers)
        else:
            words = "This server does not answer to that name. `bagua dashboard --host NAME` adds one."
            await refusal(421, words)(scope, receive, with_headers)


class Dashboard:
    """Handlers of all paths. ``connect`` makes a client of the coordinator, ``token`` is the cluster's."""

    def __init__(self, connect: Connect, access: Access, guests: Guests) -> None:
        self._connect, self.access, self.guests = connect, access, guests
        self._client: Client | None = None
        self._feeds: Feeds | None = None
        self._tabs = 0

    def app(self) -> Starlette:
        """The application. Threads begin and end with its lifespan."""
        routes = [
            Route("/", self._index),
            Route("/api/login", self._log_in, methods=["POST"]),
            Route("/api/logout", self._safely(self._log_out), methods=["POST"]),
            Route("/api/hello", self._safely(self._hello)),
            Route("/api/jobs", self._safely(self._jobs)),
            Route("/api/stream", self._safely(self._stream)),
            Route("/api/jobs/{job_id}/cancel", self._safely(self._cancel), methods=["POST"]),
            Route("/api/jobs/{job_id}/again", self._safely(self._again), methods=["POST"]),
            Route("/api/jobs/{job_id}/trace", self._safely(self._trace), methods=["POST"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        return Starlette(routes=routes, middleware=[Middleware(Headers, access=self.access)], lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._client, self._feeds = self._connect(), Feeds(self._connect)
        try:
            yield
        finally:
            self._feeds.close()
            self._client.close()

    @property
    def feeds(self) -> Feeds:
        """Feeds that tabs look at, while the application lives."""
        assert self._feeds is not None
        return self._feeds

    def _safely(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            if self.access.shows_token(request) and self.access.too_many(request):
                return refusal(429, TOO_MANY)
            if not self.access.known(request):
                return refusal(401, "Log in first.")
            self.guests.admit(request.client)
            if request.method == "POST" and not self.access.own_page(request):
                return refusal(403, "This request does not come from the dashboard's own page.")
            try:
                return await handler(request)
            except BaguaError as error:
                return refusal(next((code for kind, code in _STATUS if isinstance(error, kind)), 502), str(error))

        return handle

    async def _call(self, method: Callable[[Client], Any]) -> Any:
        assert self._client is not None
        return await run_in_threadpool(method, self._client)  # calls of the client block

    # ---- page and login

    async def _index(self, request: Request) -> Response:
        # Browsers ask whether it is new: a release may bring another one.
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def _log_in(self, request: Request) -> Response:
        if not self.access.own_page(request):
            return refusal(403, "This request does not come from the dashboard's own page.")
        if self.access.too_many(request):
            return refusal(429, TOO_MANY)
        given = await _body(request)
        session = self.access.log_in(request, str(given.get("token", "")).strip(), str(given.get("code", "")))
        if session is None:
            return refusal(401, "That is not the token of this cluster. It lies in the coordinator's state folder.")
        self.guests.admit(request.client)
        response = Document({"proof": self.access.proof(session)})
        self.access.set_cookie(request, response, session)
        return response

    async def _log_out(self, request: Request) -> Response:
        self.access.log_out(request)
        return Document({})

    async def _hello(self, request: Request) -> Response:
        assert self._client is not None
        return Document({"coordinator": self._client.address})

    # ---- what there is

    async def _jobs(self, request: Request) -> Response:
        """A page of jobs that have ended, or of all states that are asked for."""
        asked = [name for name in request.query_params.get("state", "").split(",") if name]
        try:
            states = [common_pb2.JobState.Value(f"JOB_STATE_{name.upper()}") for name in asked] or list(ENDED)
        except ValueError:
            return refusal(400, "state: no such state.")
        token = request.query_params.get("page", "")
        jobs, following = await self._call(lambda client: client.page(states, 50, token))
        return Document({"jobs": [job_row(job) for job in jobs], "next": following})

    async def _stream(self, request: Request) -> Response:
        if self._tabs >= MAX_TABS:
            return refusal(429, f"{MAX_TABS} tabs are open already.")
        job_id, ranks = request.query_params.get("job", ""), request.query_params.get("logs")
        leave = ExitStack()
        self._tabs += 1  # before anything is awaited: others may ask meanwhile
        leave.callback(self._leave)
        tail = None
        try:
            if job_id:
                feed = leave.enter_context(self.feeds.job(await self._call(lambda client: client.find(job_id))))
                views: list[Any] = [JobView(feed)]
                if ranks is not None:
                    tail = LogTail(self._connect, feed.job_id, _numbers(ranks), LOG_TAIL)
                    leave.callback(tail.close)
            else:
                leave.enter_context(self.feeds.cluster())
                views = [ClusterView(self.feeds)]
        except BaseException:
            leave.close()
            raise
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # nginx would hold a stream back
        return StreamingResponse(events(views, tail, leave), media_type="text/event-stream", headers=headers)

    def _leave(self) -> None:
        self._tabs -= 1

    # ---- what may be done

    async def _cancel(self, request: Request) -> Response:
        job_id = request.path_params["job_id"]
        job = await self._call(lambda client: client.cancel(job_id, reason="cancelled on the dashboard"))
        return Document(job_row(job))

    async def _again(self, request: Request) -> Response:
        """The same specification as a new job. ``key``: made by the page for each wish, so that two clicks are one."""
        job_id, key = request.path_params["job_id"], str((await _body(request)).get("key", ""))[:64]
        if len(key) < 8:
            return refusal(400, "key: at least 8 characters.")
        former = await self._call(lambda client: client.get(job_id))
        if words := no_again(former.spec):
            return refusal(409, words)
        return Document(job_row(await self._call(lambda client: submit_again(client, former, f"dashboard-{key}"))))

    async def _trace(self, request: Request) -> Response:
        """Records a step of a job that runs."""
        job_id = request.path_params["job_id"]
        async with asyncio.timeout(TRACE_S + 10):
            return Document(await self._call(lambda client: record_step(client, job_id)))


def submit_again(client: Client, former: job_pb2.Job, key: str) -> job_pb2.Job:
    """The same job anew, in its namespace. Administrators keep the Unix user of its ranks; others submit as their
    own."""
    chooses = bool(former.unix_user) and client.accounts.whoami().role == "admin"
    unix_user = former.unix_user if chooses else ""
    return client.submit(former.spec, key, namespace=former.namespace, unix_user=unix_user)


def _numbers(text: str) -> tuple[int, ...]:
    """``"0,3"``. Raises InvalidRequestError."""
    try:
        found = tuple(int(part) for part in text.split(",") if part)[:64]
        if all(0 <= rank < 1 << 32 for rank in found):
            return found
        raise ValueError
    except ValueError as error:
        raise InvalidRequestError(f"logs: {text!r} is no list of ranks. [BG820]") from error


async def _body(request: Request) -> dict[str, Any]:
    """The request's document; empty if it has none, or one that can't be read."""
    body = b""
    try:
        async for part in request.stream():  # its length is what the other end says
            body += part
            if len(body) > MAX_BODY:
                return {}
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode()  # escapes may spell what is no text
    except (ValueError, RecursionError, ClientDisconnect):
        return {}
    return found if isinstance(found, dict) else {}


def record_step(client: Client, job_id: str) -> dict[str, Any]:
    """``{"lanes": [[process, thread, [[begin ms, length ms, phase, name], ...]], ...], "missing": [...]}`` of a step
    that is recorded now. Raises ConflictError if none was."""
    document = chrome.to_chrome(client.trace(job_id, TRACED_STEPS, TRACE_S))
    step, missing = chrome.step_in_the_middle(document), document["otherData"]["missing"]
    if step is None:
        raise ConflictError(f"{' '.join(['No step was recorded.', *missing])} [BG824]")
    found = chrome.lanes(chrome.step_of(document, step))
    zero = min(event["ts"] for _, _, spans in found for event in spans)
    left, lanes = MAX_SPANS, []
    for process, thread, spans in found[:MAX_LANES]:
        rows = [
            [round((one["ts"] - zero) / 1e3, 4), round(one["dur"] / 1e3, 4), one["cat"], one["name"]]
            for one in spans[:left]
        ]
        left -= len(rows)
        lanes.append([process, thread, rows])
    return {"missing": missing[:20], "lanes": lanes}
