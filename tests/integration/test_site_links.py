"""Addresses elsewhere that pages link are found and opened: ``dev.py docs --links``, here on a server on loopback."""

from __future__ import annotations

import importlib.util
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def links() -> ModuleType:
    specification = importlib.util.spec_from_file_location("site_links", ROOT / "deploy" / "site" / "links.py")
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class Pages(BaseHTTPRequestHandler):
    """/there is a page, /moved leads to it, /silent never answers, all else is absent."""

    def do_GET(self) -> None:
        if self.path == "/silent":
            self.rfile.read(1)  # until the client has gone
            return
        code = {"/there": 200, "/moved": 302}.get(self.path, 404)
        self.send_response(code)
        if code == 302:
            self.send_header("Location", "/there")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "*")
    made = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()
    thread.join()


def test_addresses_elsewhere_are_found(links: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.html").write_text(
        '<a href="https://example.org/x?a=1&amp;b=2#part">x</a> <a href=https://example.org/y>y</a>'
        '<a href="c.html">c</a> <a href="http://127.0.0.1:8000">here</a> <a href="mailto:a@example.org">mail</a>'
    )
    (tmp_path / "c.html").write_text('<img src="https://example.org/y">')
    assert links.external(tmp_path) == {
        "https://example.org/x?a=1&b=2": ["a/b.html"],
        "https://example.org/y": ["a/b.html", "c.html"],
    }


def test_each_kind_of_trouble_is_named(links: ModuleType, server: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        gone = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        asked = [f"{server}/{name}" for name in ("there", "moved", "absent")]
        found = links.broken([*asked, gone])
    assert list(found) == [asked[2], gone]
    assert "404" in found[asked[2]] and "refused" in found[gone]


def test_a_server_that_never_answers(links: ModuleType, server: str) -> None:
    assert "timed out" in links.broken([f"{server}/silent"], timeout_s=0.2)[f"{server}/silent"]
