"""The dashboard lets in those that it should, and submits again those jobs that it can."""

import pytest
from starlette.requests import Request

from bagua.dashboard.access import CODE_S, MAX_SESSIONS, MAX_WRONG, SESSION_S, Access, cookie_name
from bagua.dashboard.documents import no_again
from bagua.proto import common_pb2


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def request(port=7680, come_from="127.0.0.1", query="", **headers):
    named = {"host": "127.0.0.1:7680", **{name.replace("_", "-"): value for name, value in headers.items()}}
    raw = [(name.encode(), value.encode()) for name, value in named.items()]
    scope = {"type": "http", "method": "POST", "scheme": "http", "path": "/", "query_string": query.encode()}
    return Request({**scope, "headers": raw, "server": ("127.0.0.1", port), "client": (come_from, 1)})


def with_session(access, session):
    proof = access.proof(session or "")
    return request(cookie=f"{cookie_name(request())}={session}", x_bagua_proof=proof)


def test_the_token_opens_a_session_that_ends():
    clock = Clock()
    access = Access("secret", clock=clock)
    assert access.log_in(request(), "wrong", "") is None and access.log_in(request(), "", "") is None
    session = access.log_in(request(), "secret", "")
    assert access.known(with_session(access, session)) and not access.known(with_session(access, "guess"))
    assert access.known(request(authorization="Bearer secret")) and not access.known(request(authorization="Bearer x"))
    clock.now += SESSION_S + 1
    assert not access.known(with_session(access, session))


def test_a_server_on_another_port_can_do_nothing_with_the_cookie():
    """Browsers send it there, too. The proof is in the storage of the page's origin."""
    access = Access("secret")
    session = access.log_in(request(), "secret", "")
    cookie = f"{cookie_name(request())}={session}"
    assert not access.known(request(cookie=cookie)) and not access.known(request(cookie=cookie, x_bagua_proof=session))
    assert not access.known(request(cookie=cookie, x_bagua_proof=Access("secret").proof(session)))
    assert not access.known(request(x_bagua_proof=access.proof(session)))
    assert not access.known(request(port=7681, cookie=cookie, x_bagua_proof=access.proof(session)))
    assert access.known(request(cookie=cookie, x_bagua_proof=access.proof(session)))
    assert access.known(request(cookie=cookie, query=f"job=a&proof={access.proof(session)}"))  # of a stream


def test_wrong_tokens_of_one_address_keep_no_other_out():
    access = Access("secret", clock=Clock())
    for _ in range(MAX_WRONG):
        access.log_in(request(come_from="10.0.0.1"), "wrong", "")
        access.log_in(request(come_from="2001:db8::1"), "wrong", "")
    assert access.too_many(request(come_from="10.0.0.1")) and access.too_many(request(come_from="2001:db8::2"))
    assert not access.too_many(request(come_from="10.0.0.2")) and not access.too_many(
        request(come_from="2001:db8:1::1")
    )


def test_a_code_opens_one_session_and_not_for_long():
    clock = Clock()
    access = Access("secret", clock=clock)
    code = access.code
    assert access.log_in(request(), "", code) is not None
    assert access.log_in(request(), "", code) is None and access.log_in(request(), "", "") is None
    late = Access("secret", clock=clock)
    code = late.code
    clock.now += CODE_S + 1
    assert late.log_in(request(), "", code) is None


def test_wrong_tokens_in_headers_are_counted_with_those_that_are_typed():
    access = Access("secret", clock=Clock())
    session = access.log_in(request(), "secret", "")
    for _ in range(MAX_WRONG // 2):
        access.log_in(request(), "wrong", "")
        assert not access.too_many(request())
        assert not access.known(request(authorization="Bearer wrong"))
    assert access.too_many(request())
    assert access.shows_token(request(authorization="Bearer secret")) and access.known(with_session(access, session))
    assert not access.shows_token(with_session(access, session))


@pytest.mark.parametrize(
    ("host", "right"),
    [
        ("127.0.0.1:7680", True),
        ("[::1]:7680", True),
        ("localhost", True),
        ("10.1.2.3:80", True),
        ("head.example:7680", True),
        ("HEAD.example", True),
        ("evil.example:7680", False),
        ("", False),
        ("[::1", True),
        ("[", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_only_names_of_this_server_are_answered(host, right):
    assert Access("secret", ["head.example"]).right_host(request(host=host)) is right


@pytest.mark.parametrize(
    ("headers", "own"),
    [
        ({}, False),
        ({"x_bagua_dashboard": "1"}, True),
        ({"x_bagua_dashboard": "1", "origin": "http://127.0.0.1:7680"}, True),
        ({"x_bagua_dashboard": "1", "origin": "http://evil.example"}, False),
        ({"x_bagua_dashboard": "1", "origin": "null"}, False),
        ({"x_bagua_dashboard": "1", "sec_fetch_site": "cross-site"}, False),
        ({"x_bagua_dashboard": "1", "sec_fetch_site": "same-site"}, False),
    ],
)
def test_changes_come_from_the_own_page(headers, own):
    assert Access("secret").own_page(request(**headers)) is own


def test_a_job_with_hidden_values_is_not_submitted_again():
    assert no_again(common_pb2.JobSpec(env={"A": "1"})) == ""
    assert "HF_TOKEN" in no_again(common_pb2.JobSpec(env={"A": "1", "HF_TOKEN": "***"}))
    assert "started by another program" in no_again(common_pb2.JobSpec(adopt=True))


def test_logging_out_ends_the_session():
    access = Access("secret")
    session = access.log_in(request(), "secret", "")
    access.log_out(with_session(access, session))
    assert not access.known(with_session(access, session))


def test_sessions_and_wrong_tokens_are_bounded():
    clock = Clock()
    access = Access("secret", clock=clock)
    first = access.log_in(request(), "secret", "")
    for _ in range(MAX_SESSIONS):
        access.log_in(request(), "secret", "")
    assert not access.known(with_session(access, first))
    for _ in range(MAX_WRONG):
        assert not access.too_many(request())
        access.log_in(request(), "wrong", "")
    assert access.too_many(request())
    clock.now += 61
    assert not access.too_many(request())
