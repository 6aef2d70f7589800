#!/usr/bin/env python3
"""Builds, checks and measures everything that needs a GPU, in one command: ``python tests/gpu/run.py --out DIR``.

It needs one NVIDIA GPU, a Python with torch for CUDA, numpy, grpcio, protobuf, ninja and pytest, g++, and nvcc; no
network, no git, no installation. Results: DIR/report.json, DIR/report.md, DIR/log.txt. Called again with the same DIR
and sources, it does what is left. Exit codes: 0 all is well, 1 something failed, 2 wrong arguments, 3 no GPU here.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests

from gpu import machine, report, sections, tree

MARK = "BAGUA_GPU_TESTS"
"""Variable of the environment by which a run knows the processes that it, or one of them, started."""
WHOLE_S = 525.0
BUILD_LIMIT_S = 200.0
PATIENCE = 4
"""A rehearsal may take so many times as long: it runs on small machines that do other things, too."""
BUILDS = {
    "core": "import bagua.csrc; print(bagua.csrc.load().__file__)",
    "GPU leg": "import bagua.csrc; print(bagua.csrc.load_device().__file__)",
    "Bagua-Net": "import bagua.csrc; print(bagua.csrc.net_plugin())",
    "kernels": "import bagua.csrc; print(bagua.csrc.kernels_library())",
    "c10d": "import torch, bagua.csrc; print(bagua.csrc.load_c10d())",
}
STAND_INS = {
    "fakes": "from rig.ranks.placing import environment; print(environment('fake'))",
    "kernels for the CPU": "from gpu.kernel_card import emulated_library; print(emulated_library())",
}
"""A rehearsal's: CUDA, NCCL and kernels for ranks, and the kernels' own source over an emulated device."""


class Run:
    def __init__(self, options, found, work, started=None):
        """``started``: by the monotonic clock, if it was before now."""
        self.options = options
        self.machine = found
        self.work = work
        self.started = time.monotonic() if started is None else started
        self.device = "fake" if options.rehearse else "cuda"
        self.patience = PATIENCE if options.rehearse else 1
        digest = f"{tree.digest()} {found['card'] or 'cpu'} {found['torch']}"
        previous = None if options.again else _previous(options.out / "report.json")
        names = [section.name for section in sections.by_name(options.sections)]
        self.to_do = sections.by_name(left) if (left := report.to_do(previous, names, digest)) else []
        kept = previous["sections"] if previous and previous.get("digest") == digest else {}
        self.cache = os.environ.get("BAGUA_CACHE_DIR") or str(Path.home() / ".cache" / "bagua")
        self.lacking = set()  # what could not be built
        self.running = []
        self.report = {
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "digest": digest,
            "rehearsal": options.rehearse,
            "machine": {**found, "cores": len(os.sched_getaffinity(0)), **machine.state()},
            "seconds": 0.0,
            "sections": kept,
        }

    def environment(self, **more):
        """Variables that every process of this run gets."""
        tests = Path(__file__).resolve().parents[1]
        paths = [str(self.work / "site"), str(tests), os.environ.get("PYTHONPATH", "")]
        # Ranks would try again to build kernels that could not be built, each of them: empty means none.
        none = {"BAGUA_DEVICE_KERNELS": ""} if "kernels" in self.lacking else {}
        return {
            "BAGUA_CUDA_ARCHS": self.machine["arch"],
            **none,
            **os.environ,
            MARK: str(os.getpid()),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            "BAGUA_CACHE_DIR": self.cache,
            "BAGUA_STATE_DIR": str(self.work / "state"),
            "NCCL_SOCKET_IFNAME": "lo",
            **more,
        }

    def left_s(self):
        return float(self.options.seconds) - (time.monotonic() - self.started) / self.patience

    def build(self):
        """Builds everything side by side; what fails is told, and the sections that don't need it run all the same."""
        wanted = {**BUILDS, **STAND_INS} if self.options.rehearse else BUILDS
        if self.options.rehearse and not shutil.which("nvcc"):
            wanted = {name: code for name, code in wanted.items() if name != "kernels"}
        logs = {name: (self.work / f"build-{index}.log").open("w+") for index, name in enumerate(wanted)}
        jobs = str(max(1, len(os.sched_getaffinity(0)) // 2))
        begun = time.monotonic()
        started = {
            name: subprocess.Popen(
                [sys.executable, "-c", code],
                env=self.environment(MAX_JOBS=jobs),
                stdout=logs[name],
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for name, code in wanted.items()
        }
        found = {"checks": [], "tables": {"seconds to build": []}, "notes": [], "finished": True}
        for name, process in started.items():
            code = _wait(process, min(BUILD_LIMIT_S, self.left_s()) * self.patience - (time.monotonic() - begun))
            seconds = time.monotonic() - begun
            logs[name].seek(0)
            words = logs[name].read().strip()
            found["checks"].append({"name": f"build {name}", "ok": code == 0, "detail": words[-1500:]})
            if code:
                self.lacking.add(name)
            found["tables"]["seconds to build"].append({"what": name, "at most": seconds})
            print(f"built {name}: {'ok' if code == 0 else f'FAILED ({code}): {words[-1500:]}'}", flush=True)
        sweep()
        status = report.status_of(found, 0)
        one = {"title": "Everything is built, side by side", "status": status, "seconds": time.monotonic() - begun}
        self.report["sections"] = {"build": {**one, "found": found}, **self.report["sections"]}
        self.write()

    def do_group(self, group, limit_s):
        """Runs sections side by side, each in a process of its own, and takes their results."""
        limit_s *= self.patience
        if not limit_s:
            for section in group:
                self._take(section, report.LEFT, 0.0, "There was no time left for it.")
            return
        begun = time.monotonic()
        started = []
        for section in group:
            missing = [name for name in section.needs if name in self.lacking]
            if missing:
                self._take(section, report.FAILED, 0.0, f"It needs {', '.join(missing)}, which could not be built.")
                continue
            print(f"\n== {section.name}: {section.title} ({limit_s:.0f} s)", flush=True)
            result = self.work / f"{section.name}.json"
            result.unlink(missing_ok=True)
            command = [sys.executable, "-m", f"gpu.{section.name}", "--result", str(result)]
            command += ["--seconds", f"{limit_s:.0f}", "--device", self.device]
            with (self.work / f"{section.name}.log").open("w") as log:
                process = subprocess.Popen(
                    command, env=self.environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            started.append((section, process))
            self.running.append((section, begun))
        for section, process in started:
            # A little more than it was told: it may still write down what it has.
            code = _wait(process, limit_s + 5 - (time.monotonic() - begun))
            found = self._found(section)
            status = report.status_of(found, code)
            why = f"Stopped at its limit of {limit_s:.0f} s." if code is None else ""
            if code and found is None:
                why = f"Exit code {code}: {(self.work / f'{section.name}.log').read_text()[-1500:]}"
            self._take(section, status, time.monotonic() - begun, why, found)
        sweep()

    def _found(self, section):
        return _previous(self.work / f"{section.name}.json")

    def end(self):
        """Ends what runs, where this run itself is ended from outside, and keeps what it had found."""
        sweep()
        for section, begun in list(self.running):
            seconds = time.monotonic() - begun
            self._take(section, report.STOPPED, seconds, "The run was ended.", self._found(section))
        self.write()

    def _take(self, section, status, seconds, why, found=None):
        one = {"title": section.title, "status": status, "seconds": seconds, "why": why}
        if found is not None:
            one["found"] = found
        self.running = [other for other in self.running if other[0] is not section]
        self.report["sections"][section.name] = one
        print(f"{section.name}: {status}, {seconds:.0f} s {why}", flush=True)
        self.write()

    def write(self):
        self.report["seconds"] = time.monotonic() - self.started
        out = self.options.out
        _replace(out / "report.json", json.dumps(self.report, indent=1))
        _replace(out / "report.md", report.markdown(self.report))
        logs = [(log.stem, log.read_text(errors="replace")) for log in sorted(self.work.glob("*.log"))]
        _replace(out / "log.txt", "".join(f"==== {name}\n{text[-200_000:]}\n" for name, text in logs))


def _previous(path):
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


def _replace(path, text):
    """Writes the file whole, whenever this run may be killed."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text)
    os.replace(scratch, path)


def _wait(process, limit_s):
    """The exit code; None if it had to be killed at its limit."""
    try:
        return process.wait(max(0.1, limit_s))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def sweep():
    """Kills what this run's processes left behind, ranks in sessions of their own too; returns how many."""
    wanted, killed = f"{MARK}={os.getpid()}".encode(), 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
                killed += 1
        except OSError:
            continue  # ended, or another user's
    return killed


def arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the report")
    parser.add_argument("--sections", "--only", nargs="*", default=[], help="only these")
    parser.add_argument("--seconds", type=float, default=WHOLE_S, help="for the whole run")
    parser.add_argument("--again", action="store_true", help="forget an earlier report in the folder")
    parser.add_argument("--rehearse", action="store_true", help="go through it all without a GPU: do the programs run?")
    parser.add_argument("--work", type=Path, help="folder for builds and logs (else a temporary one)")
    options = parser.parse_args(words)
    try:
        sections.by_name(options.sections)
    except ValueError as error:
        parser.error(str(error))
    return options


def main():
    begun = time.monotonic()
    options = arguments()
    try:
        found = machine.find(gpu=not options.rehearse)
    except machine.NoMachine as error:
        print(error, file=sys.stderr)
        return 3
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bagua-gpu-") as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        run = Run(options, found, work.resolve(), begun)
        tree.make_site(run.work / "site")
        print(f"{found['card'] or 'CPU'}, torch {found['torch']}, {len(run.to_do)} sections to do", flush=True)
        run.write()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        groups = sections.groups(run.to_do)
        try:
            if groups:
                run.build()
            for number, group in enumerate(groups):
                run.do_group(group, sections.time_for(group, groups[number + 1 :], run.left_s()))
        finally:  # also where this run itself is ended from outside: nothing of it stays on the card
            run.end()
    print("\n" + report.markdown(run.report))
    good = all(one["status"] in (report.OK, report.SKIPPED) for one in run.report["sections"].values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
