"""How the processes of pytest-xdist share the tests out: long tests begin first; a share stays in one process.

A share is a file, because the tests of a file use the same daemons, ranks and builds. Files that would keep one process
busy when all others are done are divided further.
"""


def each(name):
    """The share of a test in its file. Each test by itself: they have nothing in common."""
    return name


def by_first(name):
    """Tests of the same build of the native code, or of the same ranks: the first one waits for them."""
    return name.partition("[")[2].partition("-")[0]


LONG = {
    "native/test_native.py": by_first,
    "contract/test_algorithms.py": by_first,
    "simulation/test_control_plane.py": each,
    "integration/torch_api/test_torch_training.py": None,
    "habits/test_habits.py": None,
    "integration/data_plane/test_equality.py": None,
    "integration/node/test_node_jobs.py": None,
    "e2e/test_run.py": each,
    "soak/test_soak.py": None,
}
"""Files that begin first, in this order, and how they are divided; None: not at all."""
TOGETHER = {"integration/frameworks/test_lightning_elastic.py": "integration/frameworks/test_lightning.py"}
"""Files whose tests run in the process of another file: both fork ranks from one that has imported Lightning."""


def place_in_order(nodeid):
    """The lower, the earlier."""
    file = nodeid.partition("::")[0].removeprefix("tests/")
    return next((number for number, name in enumerate(LONG) if name == file), len(LONG))


def share_of(nodeid):
    """Name of the share that a test belongs to."""
    path, _, name = nodeid.partition("::")
    prefix = path[: len(path) - len(path.removeprefix("tests/"))]
    file = TOGETHER.get(path.removeprefix("tests/"), path.removeprefix("tests/"))
    divide = LONG.get(file)
    return f"{prefix}{file}" if divide is None else f"{prefix}{file}::{divide(name)}"


def scheduler(config, log):
    """The scheduler of pytest-xdist that keeps shares together, in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class Sharing(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return share_of(nodeid)

        def _reschedule(self, node):
            # xdist 3.8 hands on all shares of a process that crashed, also those that are done. A process that got one
            # would wait for its tests without end.
            for share in [name for name, tests in self.workqueue.items() if all(tests.values())]:
                del self.workqueue[share]
            super()._reschedule(node)

    config.option.loadscopereorder = False
    return Sharing(config, log)
