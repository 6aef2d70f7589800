"""Node daemons of tests (``rig/node_daemon.py``). All tests are on one event loop: those that leave the daemon as it is
share one, whose start costs half a second of a core."""

import asyncio
import inspect
import itertools
import tempfile
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio
from rig.node_daemon import TERMS, CoordinatorEnd, DaemonProcess, Pair, make_state

from bagua.proto.rank_pb2_grpc import RankServiceStub

fixture = pytest_asyncio.fixture(loop_scope="session")
NUMBERS = itertools.count(1)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent and inspect.iscoroutinefunction(item.obj):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def standing():
    """Returns the daemon that tests share. The first test starts it, and so does one after that which has ended it."""
    pairs = []
    with tempfile.TemporaryDirectory(prefix="bg-", ignore_cleanup_errors=True) as folder:

        async def found():
            if not pairs or pairs[-1].daemon.process.poll() is not None:
                pairs.append(await Pair(Path(folder) / f"{len(pairs)}").start())
            return pairs[-1]

        yield found
        for pair in pairs:
            await pair.stop()


@pytest.fixture
def state(short_folder):
    """Of the test's own daemons."""
    return make_state(short_folder / "state")


@fixture
async def pair(standing):
    """The shared daemon, for jobs whose ids are the test's own. It has none of them at the end."""
    found = await standing()
    end = found.end
    found.daemon.said = len(found.daemon.errors.read_text())
    end.begin(f"t{next(NUMBERS)}-")
    yield found
    try:
        if end.answers_code is not None:
            end.answers_code.set()
        if end.server is None:
            await end.start()
        end.acknowledges = True
        if end.terms != TERMS or end.grant is not None:
            await end.welcome_again(**TERMS)
        await end.end_jobs()
    except BaseException:
        found.daemon.kill()
        raise


@fixture
async def own_end(state):
    coordinator = CoordinatorEnd((state / "token").read_text())
    await coordinator.start()
    yield coordinator
    await coordinator.stop()


@pytest.fixture
def end(request):
    """Of the shared daemon, or of those that the test starts."""
    shared = "pair" in request.fixturenames
    return request.getfixturevalue("pair").end if shared else request.getfixturevalue("own_end")


@pytest.fixture
def daemon(pair):
    return pair.daemon


@fixture
async def start_daemon(state, end):
    """Starts daemons; they are stopped at the end of the test, and must then have left nothing."""
    daemons = []

    async def start(*options, pass_fds=()):
        daemons.append(DaemonProcess(state, f"127.0.0.1:{end.port}", *options, pass_fds=pass_fds))
        return await daemons[-1].until_ready()

    yield start
    for daemon in daemons:
        await asyncio.to_thread(daemon.stop)


@fixture
async def rank_stub(daemon):
    async with grpc.aio.insecure_channel(f"unix:{daemon.ready['socket']}") as channel:
        yield RankServiceStub(channel)


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
