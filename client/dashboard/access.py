"""Decides about requests: sessions by cookie, names of this server, requests of other sites.

The browser shows the cluster's token once, or a code that was printed at the start and holds once. It gets a random
session in a cookie that scripts can't read and other sites can't send, and a proof of it, which the page keeps in its
origin's storage and sends along. A cookie goes to all ports of a host, so another server there gets it, too: it lacks
the proof. Requests that change something also need a header that forms of other sites can't set, and come from this
origin.
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

from bagua.base.address import network_of

HEADER = "x-bagua-dashboard"
PROOF = "x-bagua-proof"
BEARER = "Bearer "
SESSION_S = 12 * 3600.0
MAX_SESSIONS = 500
CODE_S = 600.0  # a code that nobody used
MAX_WRONG = 20  # wrong tokens in a minute, from one address
MAX_ADDRESSES = 1_000  # whose wrong tokens are counted


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
        self._secret = secrets.token_bytes(32)  # of proofs
        self._code, self._code_ends = secrets.token_urlsafe(18), clock() + CODE_S
        self._wrong: OrderedDict[str, list[float]] = OrderedDict()  # address -> when

    @property
    def code(self) -> str:
        """Opens one session in the next ten minutes."""
        return self._code

    def log_in(self, request: Request, token: str, code: str) -> str | None:
        """A new session; None if neither is right. Compares in constant time."""
        now = self._clock()
        good = bool(token) and hmac.compare_digest(token.encode(), self._token)  # of bytes: texts may be ASCII alone
        if not good and code and self._code and now < self._code_ends:
            good = hmac.compare_digest(code.encode(), self._code.encode())
            self._code = "" if good else self._code  # it opens one session
        if not good:
            self._note_wrong(request)
            return None
        session = secrets.token_urlsafe(32)
        self._sessions[session] = now + SESSION_S
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def proof(self, session: str) -> str:
        """Returns the proof that the page shows with the cookie of that session."""
        return hmac.new(self._secret, session.encode(), "sha256").hexdigest()

    def _note_wrong(self, request: Request) -> None:
        self._wrong.setdefault(_address(request), []).append(self._clock())
        while len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)

    def too_many(self, request: Request) -> bool:
        """True if so many wrong tokens came lately from the address of a request that no other is looked at."""
        address, now = _address(request), self._clock()
        lately = [one for one in self._wrong.pop(address, []) if now - one < 60.0]
        if lately:
            self._wrong[address] = lately
        return len(lately) >= MAX_WRONG

    def _session(self, request: Request) -> str:
        return request.cookies.get(cookie_name(request), "")

    def log_out(self, request: Request) -> None:
        self._sessions.pop(self._session(request), None)

    def shows_token(self, request: Request) -> bool:
        """True if the request has a token, right or wrong, as programs send it."""
        return request.headers.get("authorization", "").startswith(BEARER)

    def known(self, request: Request) -> bool:
        """True if the request has a session, or the token itself. A wrong token is counted."""
        if self.shows_token(request):
            given = request.headers["authorization"].removeprefix(BEARER)
            good = hmac.compare_digest(given.encode(), self._token)
            if not good:
                self._note_wrong(request)
            return good
        session = self._session(request)
        shown = request.headers.get(PROOF) or request.query_params.get("proof", "")  # a stream can't send headers
        if not hmac.compare_digest(shown.encode(), self.proof(session).encode()):
            return False
        ends = self._sessions.get(session)
        return ends is not None and self._clock() < ends

    def set_cookie(self, request: Request, response: Response, session: str) -> None:
        """The browser keeps it until it is closed, sends it to this host alone, and shows it to no script."""
        name = cookie_name(request)
        response.set_cookie(name, session, httponly=True, samesite="strict", secure=self._secure, path="/")

    def right_host(self, request: Request) -> bool:
        """The browser called this server by a name of its own: another site's name may have been pointed here."""
        name = request.headers.get("host", "").lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.rsplit(":", 1)[0]
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)  # no site can point an address elsewhere
        except ValueError:
            return False
        return True

    def own_page(self, request: Request) -> bool:
        """A request that changes something comes from our page (or from a program, which sends no Origin)."""
        if request.headers.get(HEADER) != "1":
            return False
        # Older browsers don't send it.
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = request.headers.get("origin")
        return origin is None or origin == f"{request.url.scheme}://{request.headers.get('host', '')}"


def cookie_name(request: Request) -> str:
    """Servers on other ports of the host have other names. ``__Host-``: none of them can set it over plain HTTP."""
    return f"{'__Host-' if request.url.scheme == 'https' else ''}bagua_dashboard_{request.scope['server'][1]}"


def _address(request: Request) -> str:
    return network_of(request.client.host) if request.client else ""
