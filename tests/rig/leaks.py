"""Where a secret can be read by somebody who should not: command lines, environments, files, output."""

import secrets
import stat
from pathlib import Path

HOLD = """
    import hashlib, os, pathlib, time

    print("has", hashlib.sha256(os.environ["HF_TOKEN"].encode()).hexdigest(), flush=True)
    pathlib.Path("has-" + os.environ["RANK"]).touch()
    end = time.monotonic() + 300
    while not pathlib.Path("stop").exists() and time.monotonic() < end:
        time.sleep(0.05)
"""
"""A program of ranks that tells which secret it has, and waits for the file "stop"."""


def secret_file(folder):
    """Writes a new secret to ``hf.token`` there; its value."""
    value = secrets.token_hex(16)
    path = folder / "hf.token"
    path.touch(mode=0o600)
    path.write_text(f"{value}\n")
    return value


def assert_kept(secret, given, *folders):
    """The ranks of HOLD have it, and nobody else: it lies in the file ``given`` alone. ``folders``: of all programs."""
    assert in_command_lines(secret) == []
    assert in_environments(secret, but=b"RANK") == [] and in_environments(secret, but=b"") != []
    assert in_files(secret, *folders) == {str(given): 0o600}


def in_command_lines(secret):
    """Command lines of this machine's processes that have it, which every user can read."""
    return [where for where, _ in _processes("cmdline", secret)]


def in_environments(secret, but):
    """Processes that were started with it in their environment; not those that have the variable ``but`` as well."""
    return [where for where, text in _processes("environ", secret) if b"\0" + but + b"=" not in b"\0" + text]


def in_files(secret, *folders):
    """Files below the folders that have it, with their permissions."""
    found = {}
    for path in (path for folder in folders for path in folder.rglob("*")):
        try:
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and secret.encode() in path.read_bytes():
                found[str(path)] = stat.S_IMODE(status.st_mode)
        except FileNotFoundError:  # removed meanwhile
            continue
    return found


def _processes(name, secret):
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / name).read_bytes()
            if secret.encode() in text:
                yield f"{entry.name}: {(entry / 'cmdline').read_bytes()!r}", text
        except OSError:  # it has ended, or is another user's
            continue
