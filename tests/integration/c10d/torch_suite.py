"""Runs tests of torch's own suite for backends in a rank: ``torch.testing._internal.distributed.distributed_test``.

torch decides which tests to skip as for Gloo, so all that Gloo passes is tried. Then the backend is ours. Tests run one
after the other in the same processes, each with a process group of its own. That is harder than torch's way, which
starts processes for each: nothing of a group may disturb the next one.

``python tests/integration/c10d/torch_suite.py`` runs all of them and prints the rows of the list torch-suite.md; names
after it: those alone. ``--gloo``: over Gloo itself.
"""

import json
import logging
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

RANKS = 3
REASONS = []
"""For which the test that runs is skipped."""
LISTS = ("PROFILING_SUPPORTED_BACKENDS", "CUDA_PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS")


class LikeGloo(str):
    """The name of a backend for which tests choose what they choose for Gloo."""

    def __eq__(self, other):
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


class Reasons(logging.Handler):
    """Notes why torch skips a test: it tells its log alone."""

    def emit(self, record):
        if "skipping test" in record.msg and record.args:
            REASONS[:] = [str(record.args[-1])]


def load(backend, folder="/tmp"):
    """torch's module, and the class of its tests. Those that begin anew meet in a file of this folder."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), INIT_METHOD=f"file://{folder}/anew")
    os.environ.setdefault("TEMP_DIR", "/tmp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_distributed
        from torch.testing._internal.distributed import distributed_test as suite
    for feature in ("plugin", "ddp", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add(backend)
    for name in LISTS:
        getattr(suite, name).append(backend)
    suite.BACKEND = LikeGloo(backend)

    class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        pass

    return suite, Tests


def all_names():
    """Of the tests, in their order."""
    _, tests = load("bagua")
    return sorted(name for name in dir(tests) if name.startswith("test_"))


def run_one(suite, tests, name, folder):
    """ "passed", "skipped: why" or "failed: why", on this rank."""
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.testing._internal.common_distributed import TEST_SKIPS

    test = getattr(tests, name)
    if getattr(test, "__unittest_skip__", False):
        return f"skipped: {test.__unittest_skip_why__}"
    rank = int(os.environ["RANK"])
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    suite.Barrier.barrier_id = 0
    ours, theirs = mp.Pipe()
    try:
        tests._run(rank, name, str(folder / "store"), theirs)
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        return "failed: " + traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    for skip in TEST_SKIPS.values():
        if code == skip.exit_code:
            return f"skipped: {REASONS.pop() if REASONS else skip.message}"
    if not code:
        return "passed"
    return "failed: " + (str(ours.recv()) if ours.poll(1) else f"exit code {code}")


def run_suite(names, folder, backend="bagua"):
    """In a rank: the outcome of each test. Ends with the first that fails: others may wait for this rank in it."""
    import torch.distributed as dist

    import bagua.c10d  # noqa: F401

    suite, tests = load(backend, folder)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")  # torch's tests warn
    logger = logging.getLogger("torch.testing._internal.common_distributed")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(Reasons())
    found = {}
    for name in names:
        dist.set_debug_level(dist.DebugLevel.OFF)  # some tests leave another one behind: torch starts processes anew
        begun = time.monotonic()
        found[name] = run_one(suite, tests, name, Path(folder) / name)
        print(json.dumps({"name": name, "found": found[name], "seconds": time.monotonic() - begun}), flush=True)
        if found[name].startswith("failed"):
            sys.stdout.flush()
            os._exit(1)  # the daemon takes this rank for lost, so the others end, too
    return found


def outcome_of(logs):
    """The outcome of each test that began: passed where it did on all ranks, else the first other word."""
    by_rank = []
    for log in logs:
        lines = [json.loads(line) for line in log.splitlines() if line.startswith('{"name"')]
        by_rank.append({line["name"]: line["found"] for line in lines})
    names = dict.fromkeys(name for found in by_rank for name in found)
    merged = {}
    for name in names:
        said = [found.get(name, "failed: it did not end") for found in by_rank]
        failed = [text for text in said if text.startswith("failed") and "did not end" not in text]
        others = [text for text in said if text != "passed"]
        merged[name] = (failed or others or ["passed"])[0]
    return merged


def main(names):
    """Runs tests, and again what follows one that failed."""
    import shutil
    import tempfile

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from rig.ranks.engine_hosts import make_ranks

    backend = "gloo" if "--gloo" in names else "bagua"
    left = [name for name in names if name != "--gloo"] or all_names()
    outcomes = {}
    while left:
        folder = Path(tempfile.mkdtemp(prefix="suite-"))
        with make_ranks(folder) as ranks:
            started = ranks.start(run_suite, RANKS, names=left, folder=str(folder), backend=backend)
            deadline = time.monotonic() + 60 + 30 * len(left)
            while any(one.process.poll() is None for one in started) and time.monotonic() < deadline:
                time.sleep(0.2)
            found = outcome_of([one.output for one in started])
            if not found:
                print(*(one.output for one in started), sep="\n")
                return 1
        shutil.rmtree(folder, ignore_errors=True)
        outcomes |= found
        for name, text in found.items():
            print(f"| `{name}` | {' '.join(text.split()) if text.startswith('failed') else text} |", flush=True)
        left = [name for name in left if name not in outcomes]
    counts = {
        word: sum(text.startswith(word) for text in outcomes.values()) for word in ("passed", "skipped", "failed")
    }
    print(counts)
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
