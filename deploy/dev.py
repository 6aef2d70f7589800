#!/usr/bin/env python3
"""Commands for work on Bagua, each of which sets a fresh machine up by itself. They need Python 3.11+ with venv and
header files, g++ and git.

    python3 deploy/dev.py demo      set up, then train digits on two node daemons with two ranks each
    python3 deploy/dev.py test      set up, then run every check and test (what CI runs)
    python3 deploy/dev.py test --full             and the long tests, too
    python3 deploy/dev.py test tests/unit -k x    set up, then run some tests
    python3 deploy/dev.py lint      set up, then run the static checks alone
    python3 deploy/dev.py develop   set up an editable installation to work on
    python3 deploy/dev.py proto     generate the protobuf code again
    python3 deploy/dev.py docs      build the site of docs/ (--serve HOST:PORT shows it)

For a release (docs/releasing.md; each has --help):
    python3 deploy/dev.py dist      source distribution and wheel, the same from every build
    python3 deploy/dev.py prebuilt  the core, compiled for common processors, as a wheel
    python3 deploy/dev.py man       pages for man(1), and completions for shells
    python3 deploy/dev.py lock      requirements of the container image, with hashes
    python3 deploy/dev.py sbom      the bill of materials, and an audit of it
    python3 deploy/dev.py image     the container image

The virtual environment is .venv in the checkout (BAGUA_VENV names another place). Running a command again is cheap:
what is already in place is left alone. BAGUA_TORCH=2.8.0 takes that torch, in an environment of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = os.environ.get("BAGUA_TORCH")
VENV = Path(os.environ.get("BAGUA_VENV") or ROOT / (f".venv-torch-{TORCH}" if TORCH else ".venv"))
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
# Generated code demands a protobuf runtime at least as new as its generator, so the generator is an old one, in an
# environment of its own.
GENERATOR = ["grpcio-tools==1.71.2", "mypy-protobuf==3.6.0", "setuptools<81"]
# For machines without an nvcc, in a folder of its own: torch may have brought another version of these.
NVCC = [
    "nvidia-cuda-nvcc==13.0.88",
    *(f"nvidia-{name}<13.1" for name in ("cuda-runtime", "cuda-cccl", "cuda-crt", "nvvm")),
]
NVCC_FOLDER = VENV / "nvcc"
# Versions of NCCL whose insides tests/native/nccl_net/real_nccl knows, one for each version of the interface; in
# folders of their own for the same reason.
NCCL = [*(f"nvidia-nccl-cu12=={version}" for version in ("2.21.5", "2.25.1", "2.27.5"))]
NCCL += [*(f"nvidia-nccl-cu13=={version}" for version in ("2.28.9", "2.32.3"))]
NCCL_REFERENCE = "nvidia-nccl-cu13==2.28.9"  # the others are for --full
NCCL_FOLDER = VENV / "nccl"
# Programs that tests drive, each with its package of Debian: PyPI has none of them.
PROGRAMS = {
    "chromium": "chromium",
    "mpiexec.hydra": "mpich",
    "mpirun.openmpi": "openmpi-bin",
    "pgbouncer": "pgbouncer",
    "promtool": "prometheus",
    "redis-server": "redis-server",
    "sshd": "openssh-server",
}
PR_SET_CHILD_SUBREAPER = 36
NO_SERVICES = Path("/usr/sbin/policy-rc.d")  # Debian's packages ask it whether to start what they install
# Tests wait more than they compute: there are more processes than cores. tests/conftest.py says how they share the
# tests out.
WORKERS = min(2 * (os.cpu_count() or 1), 6)
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}  # of tests: modules are compiled once, whatever the user's environment says
EDITABLE = VENV / ".bagua-editable"  # Exists while ``develop``'s installation is the one in the environment
PACKAGED = ("proto", "daemon", "client", "csrc", "algorithms", "deploy", "docs/errors")
RELEASE = ("dist", "prebuilt", "man", "lock", "sbom", "image")  # Commands that are programs beside this one


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def run(*command: str | Path, env: dict[str, str] | None = None, check: bool = True) -> int:
    """Runs a command in the checkout; ends this program with its exit code if it fails."""
    # PYTHONSAFEPATH: the flat folders proto/ and daemon/ must not shadow packages of the same name.
    full = {**os.environ, "PYTHONSAFEPATH": "1", **(env or {})}
    code = subprocess.run([str(part) for part in command], cwd=ROOT, env=full).returncode
    if check and code:
        shown = [str(part) for part in command[:8]] + ["…"] * (len(command) > 8)  # a linter gets all files
        print(f"failed ({code}): {' '.join(shown)}", file=sys.stderr)
        sys.exit(code if code > 0 else 1)  # negative: killed by a signal
    return code


def tool(name: str) -> Path:
    """A program of the virtual environment."""
    return VENV / "bin" / name


def digest(paths: Sequence[Path], *extra: str) -> str:
    """A hash of the contents of files."""
    found = hashlib.sha256("\0".join(extra).encode())
    for path in sorted(paths):
        found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def sources() -> list[Path]:
    """Every file that may go into the wheel."""
    names = [path for top in PACKAGED for path in (ROOT / top).rglob("*") if path.is_file()]
    return [p for p in names if "__pycache__" not in p.parts and p.suffix != ".pyc"] + [ROOT / "pyproject.toml"]


def check_machine() -> None:
    """Names what is missing before anything is installed."""
    if sys.platform != "linux":
        sys.exit("Bagua runs on Linux alone: use a Linux machine, a Linux container or, on Windows, WSL 2.")
    if sys.version_info < (3, 11):  # noqa: UP036 - started by whatever python3 the machine has
        sys.exit(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}. Run with a newer python3.")
    if not shutil.which("g++"):
        sys.exit("g++ is needed to build the native core: install it (Debian, Ubuntu: apt-get install g++).")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        sys.exit(
            "Python's header files are needed to build the native core: install them (Debian, Ubuntu: apt-get install "
            "python3-dev)."
        )


def make_venv() -> None:
    if not tool("pip").exists():  # an environment that was left half made has a python alone
        if importlib.util.find_spec("ensurepip") is None:
            sys.exit("Python's module venv is not complete: install it (Debian, Ubuntu: apt-get install python3-venv).")
        say(f"virtual environment {VENV}")
        run(sys.executable, "-m", "venv", VENV)
        pip("install", "--upgrade", "pip", "setuptools>=77", "wheel")


def pip(*arguments: str | Path, quiet: bool = False) -> None:
    """Runs pip. ``quiet``: what takes a moment. Of anything longer pip shows what it fetches, and how much is left."""
    run(tool("python"), "-m", "pip", *arguments, *(["--quiet"] if quiet else []), "--disable-pip-version-check")


def once(stamp: str, key: str, action: Callable[[], None]) -> None:
    """Does ``action`` unless it was done with the same key before."""
    path = VENV / f".bagua-{stamp}"
    if path.exists() and path.read_text() == key:
        return
    path.unlink(missing_ok=True)  # an action that is interrupted is done again
    action()
    path.write_text(key)


def install_dependencies(extra: str) -> None:
    def action() -> None:
        say("packages")
        # torch first and alone: a range would make pip look for the newest build.
        torch = [f"torch=={TORCH}"] if TORCH else ["-c", CONSTRAINTS, "torch"]
        pip("install", *torch)
        pip("install", *torch, f"{ROOT}[{extra}]")
        # Leftovers of the build by pip in the tree.
        for rubbish in (*ROOT.glob("*.egg-info"), ROOT / "build" / "lib", *ROOT.glob("build/bdist*")):
            shutil.rmtree(rubbish, ignore_errors=True)
        (VENV / ".bagua-package").unlink(missing_ok=True)
        EDITABLE.unlink(missing_ok=True)

    once(f"dependencies-{extra}", digest([ROOT / "pyproject.toml", CONSTRAINTS], TORCH or ""), action)


def build_wheel(out: Path) -> Path:
    """The wheel of the sources as they are; nothing is left behind in the checkout."""
    run(tool("python"), ROOT / "deploy" / "dist.py", "--wheel-only", "--out", out)
    return next(out.glob("*.whl"))


def install_package() -> None:
    def action() -> None:
        say("bagua itself")
        with tempfile.TemporaryDirectory() as out:
            pip("install", "--no-deps", "--force-reinstall", build_wheel(Path(out)), quiet=True)
        EDITABLE.unlink(missing_ok=True)

    once("package", digest(sources()), action)


def set_up(extra: str) -> None:
    check_machine()
    make_venv()
    install_dependencies(extra)
    install_package()
    say("native core")
    run(tool("python"), "-c", "import bagua.csrc; bagua.csrc.load(); print(bagua.csrc.core_path())")


def provide_nvcc() -> None:
    """pip's nvcc for this process and those it starts, unless the machine has one."""
    code = "import sys; from bagua.csrc import build_cuda; sys.exit(0 if build_cuda.find_nvcc() else 3)"
    if run(tool("python"), "-c", code, check=False) != 3:
        return
    once("nvcc", digest([], *NVCC), lambda: pip("install", "--upgrade", "--target", NVCC_FOLDER, *NVCC))
    home = NVCC_FOLDER / "nvidia" / "cu13"
    print(f"no nvcc on this machine: pip's, in {home}", flush=True)
    os.environ.update(CUDA_HOME=str(home), PATH=f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}")


def provide_nccl(full: bool) -> None:
    """NCCL's libraries and headers for tests, where there are the builds that they know. ``full``: all versions."""
    if platform.machine() != "x86_64":
        return
    folders = []
    for wheel in NCCL if full else [NCCL_REFERENCE]:
        target = NCCL_FOLDER / wheel.rpartition("==")[2]
        options = ["--upgrade", "--no-deps", "--target", target]
        once(f"nccl-{target.name}", wheel, lambda options=options, wheel=wheel: pip("install", *options, wheel))
        folders.append(target / "nvidia" / "nccl")
    os.environ["BAGUA_TEST_NCCL"] = os.pathsep.join(map(str, folders))


def install_programs() -> None:
    """Installs what Debian has of PROGRAMS, by root, or by sudo if the user agrees; else says which tests are left out.
    No server is started."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    packages = ["apt-get", "install", "--yes", "--no-install-recommends", *(PROGRAMS[name] for name in missing)]
    command = " ".join(packages)
    if not missing:
        return
    if not shutil.which("apt-get") or (os.geteuid() != 0 and not sudo_is_wanted(command)):
        print(f"Tests of {', '.join(missing)} are left out. With them: {command}", flush=True)
        return
    say(f"packages of Debian: {' '.join(packages[4:])}")
    prefix = [] if os.geteuid() == 0 else ["sudo"]
    refuse = "echo 'exit 101' > {0} && chmod 755 {0}" if not NO_SERVICES.exists() else "true"
    run(*prefix, "sh", "-c", refuse.format(NO_SERVICES))
    try:
        run(*prefix, "apt-get", "update", "--quiet", check=False)
        run(*prefix, "env", "DEBIAN_FRONTEND=noninteractive", *packages, check=False)  # tests tell what is missing
    finally:
        if refuse != "true":
            run(*prefix, "rm", NO_SERVICES)


def sudo_is_wanted(command: str) -> bool:
    """Asks once, if somebody is there to answer."""
    asked = VENV / ".bagua-asked"
    if asked.exists() or not (shutil.which("sudo") and sys.stdin.isatty()):
        return False
    asked.touch()
    return input(f"Some tests need programs. Run this? sudo {command} [y/N] ").strip().lower() == "y"


def build_parts(full: bool) -> None:
    """Builds the parts beside the core, for all architectures, and the programs of native tests."""
    say("GPU leg, network plugin, backend of torch.distributed, CUDA kernels")
    for function in ("load_device().__file__", "net_plugin()", "load_c10d().__file__"):
        # torch comes first: its backend needs torch's libraries.
        run(tool("python"), "-c", f"import torch, bagua.csrc; print(bagua.csrc.{function})")
    provide_nvcc()
    os.environ["NVCC_APPEND_FLAGS"] = "--Werror=all-warnings"  # for users a warning of their compilers is none
    run(tool("python"), "-c", "import bagua.csrc; print(bagua.csrc.kernels_library())")
    say("programs of native tests (three minutes the first time)")
    run(tool("python"), ROOT / "tests" / "native" / "build_programs.py", *(["--full"] if full else []))


def import_tests() -> None:
    """Imports all tests once. pytest rewrites the assertions of a file when it imports it for the first time, which
    takes as long as all other imports. Each of its processes would do so for all files."""
    say("imports of the tests")
    command = [tool("python"), "-m", "pytest", "--collect-only", "-q"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **BYTECODE}
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)  # pytest itself will tell of errors


def demo(arguments: list[str]) -> None:
    set_up("examples")
    say("bagua run --nnodes 2 --nproc-per-node 2 -m bagua.examples.digits")
    run(tool("bagua"), "run", "--nnodes", "2", "--nproc-per-node", "2", "-m", "bagua.examples.digits", *arguments)


def develop(_: list[str]) -> None:
    check_machine()
    make_venv()
    install_dependencies("dev")
    # strict: type checkers see the packages; run it again after adding a file.
    pip("install", "--no-deps", "--no-build-isolation", "-e", ROOT, "-C", "editable_mode=strict", quiet=True)
    (VENV / ".bagua-package").unlink(missing_ok=True)
    EDITABLE.touch()
    for rubbish in ROOT.glob("*.egg-info"):
        shutil.rmtree(rubbish)


def generate_proto(out: Path) -> None:
    """Generates Python code and type stubs of proto/*.proto into ``out``."""
    home = VENV / "protoc"
    if not (home / "bin" / "protoc-gen-mypy").exists():
        run(sys.executable, "-m", "venv", home)
        run(home / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *GENERATOR)
    names = [f"bagua/proto/{path.name}" for path in sorted((ROOT / "proto").glob("*.proto"))]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python")]
    outputs += [f"--{kind}_out=quiet:{out}" for kind in ("mypy", "mypy_grpc")]
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    run(home / "bin" / "python", "-m", "grpc_tools.protoc", "-Ibagua/proto=proto", *outputs, *names, env={"PATH": path})
    for empty in (out / "bagua" / "proto").glob("common_pb2_grpc.*"):
        empty.unlink()  # common.proto has no service


def proto(arguments: list[str]) -> None:
    make_venv()
    with tempfile.TemporaryDirectory() as scratch:
        generate_proto(Path(scratch))
        made = {path.name: path.read_bytes() for path in (Path(scratch) / "bagua" / "proto").iterdir()}
    present = {path.name: path.read_bytes() for path in (ROOT / "proto").glob("*_pb2*")}
    if "--check" in arguments:
        stale = sorted(name for name in made.keys() | present.keys() if made.get(name) != present.get(name))
        if stale:
            sys.exit(f"Generated code is stale: {', '.join(stale)}. Run: python3 deploy/dev.py proto")
        return
    for name in present.keys() - made.keys():
        (ROOT / "proto" / name).unlink()
    for name, data in made.items():
        (ROOT / "proto" / name).write_bytes(data)


def check_sources() -> None:
    """Static checks: style, types, arrows, formatting of C++, freshness of generated code."""
    say("ruff")
    run(tool("ruff"), "check", ".")
    run(tool("ruff"), "format", "--check", ".")
    say("clang-format")
    files = [
        str(p)
        for top in ("csrc", "tests")
        for p in (ROOT / top).rglob("*")
        if p.suffix in (".h", ".cpp", ".cu", ".cuh")
    ]
    run(tool("clang-format"), "--dry-run", "--Werror", *files)
    say("generated protobuf code")
    proto(["--check"])
    say("mypy --strict")
    run(tool("mypy"), "-p", "bagua", "-p", "_bagua_autoload", "--cache-dir", VENV / "mypy-cache")
    say("import-linter")
    run(tool("lint-imports"), "--cache-dir", VENV / "import-linter-cache")


def lint(_: list[str]) -> None:
    """The static checks that ``test`` begins with, of the sources as they are."""
    started = time.monotonic()
    check_machine()
    make_venv()
    install_dependencies("dev")
    if not EDITABLE.exists():
        install_package()  # mypy and import-linter look at what is installed
    check_sources()
    print(f"\n{time.monotonic() - started:.0f} s in all", flush=True)


def test(arguments: list[str]) -> None:
    """Runs all tests without arguments, or with --full alone; else those that the arguments name for pytest."""
    started = time.monotonic()
    everything = set(arguments) <= {"--full"}
    set_up("dev")
    if everything:
        install_programs()
        check_sources()
        build_parts("--full" in arguments)
        import_tests()
    provide_nccl("--full" in arguments)
    say("pytest, against the installed wheel")
    options = [f"--numprocesses={WORKERS}"]  # may be given again among the arguments
    options += ["--durations=25"] if everything else []
    with tempfile.TemporaryDirectory(prefix="bg-") as short:  # Unix sockets lie below it
        command = [str(tool("python")), "-m", "pytest", *options, f"--basetemp={short}/t", *arguments]
        code, seconds = timed(command)
    print(f"\n{time.monotonic() - started:.0f} s in all; the tests took {seconds:.0f} s of a core", flush=True)
    sys.exit(code)


def timed(command: Sequence[str]) -> tuple[int, float]:
    """Runs a command, and returns its exit code, and the processor time of all that it started, orphans as well."""
    # Orphans become children of this process, else init would get them and their time.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = os.times()
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONSAFEPATH": "1", **BYTECODE})
    while (ended := os.waitpid(-1, 0))[0] != process.pid:
        pass
    process.returncode = os.waitstatus_to_exitcode(ended[1])
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return process.returncode, used


def program(path: str, extra: str = "dev") -> Callable[[list[str]], None]:
    """The command that runs ``deploy/<path>.py`` with the packages of ``extra``, and bagua, installed. An environment
    for development has all of these packages."""

    def command(arguments: list[str]) -> None:
        check_machine()
        make_venv()
        install_dependencies("dev" if (VENV / ".bagua-dependencies-dev").exists() else extra)
        if not EDITABLE.exists():
            install_package()
        # These programs import each other from their folder.
        run(tool("python"), ROOT / "deploy" / f"{path}.py", *arguments, env={"PYTHONSAFEPATH": ""})

    return command


def main() -> None:
    commands = {"demo": demo, "test": test, "lint": lint, "develop": develop, "proto": proto}
    commands |= {"docs": program("site/build", "docs")} | {name: program(name) for name in RELEASE}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on: to the example, pytest, the program")
    options = parser.parse_args()
    commands[options.command](options.arguments)


if __name__ == "__main__":
    main()
