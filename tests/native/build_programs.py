"""Builds the programs of native tests, so that no test waits for the compiler: ``build_programs.py [--full]``.

What is built is kept, so a second run takes a second.
"""

import functools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / folder) for folder in (".", "kernels", "leg", "nccl_net")] + [str(HERE.parent)]

import emulated  # noqa: E402
import fakes  # noqa: E402
import native_build as native  # noqa: E402
import test_native  # noqa: E402
import test_nccl_net_native  # noqa: E402
import test_real_nccl  # noqa: E402


def programs(full):
    """Those that take long, the longest first. Tests with ``--full`` alone build some more by themselves."""
    core = {
        f"core, {name}": lambda name=name, suites=suites: test_native.build(
            name, native.cache_folder(), test_native.SUITES if full else suites, full
        )
        for name, suites in test_native.ALWAYS.items()
        if full or suites
    }
    return core | {
        "kernels, asan": lambda: emulated.program("asan", native.cache_folder()),
        "network plugin, asan": lambda: test_nccl_net_native.build("asan", native.cache_folder(), full),
        "fakes of CUDA and NCCL": lambda: fakes.build(fakes.cache_folder()),
        **{f"search, {suite}": functools.partial(test_native.build_search, suite) for suite in test_native.SEARCHES},
        "portable kernels": test_native.build_portable,
        "real NCCL": lambda: test_real_nccl.build(test_real_nccl.REFERENCE),
    }


def main(arguments):
    """Builds all of them, and says how long each took."""

    def build(name, make):
        started = time.monotonic()
        make()
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(build, *item) for item in programs("--full" in arguments).items()]
    errors = [str(error) for error in (future.exception() for future in futures) if error is not None]
    if errors:
        print("\n".join(errors), file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
