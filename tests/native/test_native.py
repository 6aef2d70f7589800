"""Builds and runs the native tests of the core: plain, under ASan + UBSan, and under TSan.

Every ``*_test.cpp`` here, in ``engine`` and in ``transport`` is a suite; it is linked with ``harness.cpp`` and all
sources of ``csrc/core`` but the bindings (they need Python). To add tests, add a file.
``native_build.py`` is the builder.
"""

import functools
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import native_build as native  # noqa: E402

SEARCHES = {
    "succession_test": ("engine/job/succession.cpp", "engine/values/options.cpp"),
    "meeting_model_test": (),
}
"""Suites that take much time, and the files of the core that they need."""
FILES = {path.stem: path for folder in (".", "engine", "transport") for path in (HERE / folder).glob("*_test.cpp")}
SUITES = sorted(name for name in FILES if name not in SEARCHES)
PORTABLE = "kernel_test"
"""A suite that needs the kernels alone; it is compiled without the processor's extensions, too."""
# Suites in which most threads meet: TSan looks for races there; --full has the others.
TSAN = "channel_test engine_test generation_test lifeline_test meeting_test".split()
JOINED = [
    "mesh_balance mesh_ending mesh_fault mesh_seal mesh mesh_watch".split(),
    "base budget codec kernel low_rank ring_order seal socket spawn step_clock stream_count".split(),
    "communicators control engine host_api routes".split(),
    "channel collective lifeline meeting transfer".split(),
]
"""Suites that are compiled together; names without linkage differ between them. Others are compiled by themselves."""
ALWAYS = {"plain": [], "asan": SUITES, "tsan": TSAN}
"""Suites that run without --full. The plain build is the core that all other tests run."""


def build(name, folder, suites, full=True):
    """The test program: the core, the harness, the suites."""
    left, units = [FILES[suite] for suite in suites], [HERE / "harness.cpp"]
    for names in JOINED:
        together = [path for path in left if path.stem.removesuffix("_test") in names]
        left = [path for path in left if path not in together]
        units += native.join(together, folder)
    return native.build(name, folder, [*native.core_sources(), *units, *left], *([] if full else native.LEAN[name]))


@pytest.mark.timeout(1200)  # the first suite of a build waits for the compiler
@pytest.mark.parametrize(
    ("name", "suite"),
    [
        pytest.param(name, suite, marks=() if suite in ALWAYS[name] else pytest.mark.full)
        for name in ALWAYS
        for suite in SUITES
    ],
)
def test_native(request, name, suite):
    """One suite under one build."""
    full = request.config.getoption("--full")
    native.check(name, functools.partial(program, name, full), suite)


@functools.cache
def program(name, full):
    """The program of a build, with the suites that this run takes from it."""
    return build(name, native.cache_folder(), SUITES if full else ALWAYS[name], full)


def build_portable():
    """The kernels' suite without the processor's extensions."""
    sources = [HERE / "harness.cpp", FILES[PORTABLE], *sorted((native.CORE / "kernel").glob("*.cpp"))]
    return native.build("portable", native.cache_folder(), sources)


def build_search(suite):
    """A search is worth optimised code, which few files are for it."""
    units = [native.CORE / name for name in SEARCHES[suite]]
    return native.build("portable", native.cache_folder(), [HERE / "harness.cpp", FILES[suite], *units])


@pytest.mark.timeout(600)
def test_portable_kernels():
    """The paths of a processor without extensions."""
    native.check("portable", build_portable, PORTABLE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("suite", SEARCHES)
def test_every_history(request, suite):
    """All orders of events, within a bound that --full widens: losses of members and the news of them, and steps of
    ranks that meet."""
    more = {"BAGUA_TEST_FULL": "1"} if request.config.getoption("--full") else {}
    native.check("portable", functools.partial(build_search, suite), suite, **more)
