"""Decides about requests: sessions by cookie, names of this server, requests of other sites.

The browser shows the cluster's token once, or a code that was printed at the start and holds once. It gets a random
session in a cookie that scripts can't read and other sites can't send. Requests that change something also need a
header that forms of other sites can't set, and come from this origin.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response

COOKIE = "bagua_dashboard"
HEADER = "x-bagua-dashboard"
BEARER = "Bearer "
SESSION_S = 12 * 3600.0
MAX_SESSIONS = 500
CODE_S = 600.0  # a code that nobody used
MAX_WRONG = 20  # wrong tokens in a minute, from whomever


class Access:
    """Access to one server. ``token``: that of the cluster. ``names``: names by which browsers may call this server,
    beside addresses and this machine's own.
    """

    def __init__(
        self, token: str, names: Iterable[str] = (), secure: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._token, self._secure, self._clock = token.encode(), secure, clock
        own = {"localhost", socket.gethostname(), socket.getfqdn()}
        self._names = {name.lower() for name in (*own, *names)}
        self._sessions: OrderedDict[str, float] = OrderedDict()  # -> when it ends
        self._code, self._code_ends = secrets.token_urlsafe(18), clock() + CODE_S
        self._wrong: list[float] = []

    @property
    def code(self) -> str:
        """Opens one session in the next ten minutes."""
        return self._code

    def log_in(self, token: str, code: str) -> str | None:
        """A new session; None if neither is right. Compares in constant time."""
        now = self._clock()
        good = bool(token) and hmac.compare_digest(token.encode(), self._token)
        if not good and code and self._code and now < self._code_ends:
            good = hmac.compare_digest(code.encode(), self._code.encode())
            self._code = "" if good else self._code
        if not good:
            self._wrong.append(now)
            return None
        session = secrets.token_urlsafe(32)
        self._sessions[session] = now + SESSION_S
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def too_many(self) -> bool:
        """True if there were so many wrong tokens lately that no other is looked at."""
        now = self._clock()
        self._wrong = [one for one in self._wrong if now - one < 60.0]
        return len(self._wrong) >= MAX_WRONG

    def log_out(self, request: Request) -> None:
        self._sessions.pop(request.cookies.get(COOKIE, ""), None)

    def shows_token(self, request: Request) -> bool:
        """True if the request has a token, right or wrong, as programs send it."""
        return request.headers.get("authorization", "").startswith(BEARER)

    def known(self, request: Request) -> bool:
        """True if the request has a session, or the token itself. A wrong token is counted."""
        if self.shows_token(request):
            given = request.headers["authorization"].removeprefix(BEARER)
            good = hmac.compare_digest(given.encode(), self._token)
            if not good:
                self._wrong.append(self._clock())
            return good
        ends = self._sessions.get(request.cookies.get(COOKIE, ""))
        return ends is not None and self._clock() < ends

    def set_cookie(self, response: Response, session: str) -> None:
        """The browser keeps it until it is closed, sends it to this server alone, and shows it to no script."""
        response.set_cookie(COOKIE, session, httponly=True, samesite="strict", secure=self._secure, path="/")

    def right_host(self, request: Request) -> bool:
        """The browser called this server by a name of its own: another site's name may have been pointed here."""
        name = request.headers.get("host", "").lower()
        name = name[: name.index("]") + 1].strip("[]") if name.startswith("[") else name.rsplit(":", 1)[0]
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def own_page(self, request: Request) -> bool:
        """A request that changes something comes from our page (or from a program, which sends no Origin)."""
        if request.headers.get(HEADER) != "1":
            return False
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = request.headers.get("origin")
        return origin is None or origin == f"{request.url.scheme}://{request.headers.get('host', '')}"
