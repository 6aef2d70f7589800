"""Where a secret can be read by somebody who should not: command lines, environments, files."""

import secrets

LOOK = """
    import hashlib, os, pathlib
    value = os.environ["HF_TOKEN"].encode()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue  # it has ended meanwhile, or is another user's
        if value in command or value in environment and b"RANK=" not in environment:
            print("seen in", command)
    print(hashlib.sha256(value).hexdigest())
    raise SystemExit(3)  # what failed keeps its state: database and logs
"""
"""A program of ranks. It tells which secret it has, and who else of this machine's processes has it."""


def secret_file(folder):
    """A file with a new secret, and that."""
    path, value = folder / "hf.token", secrets.token_hex(16)
    path.touch(mode=0o600)
    path.write_text(f"{value}\n")
    return path, value


def files_with(secret, *folders):
    """Files below the folders that have it."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if secret.encode() in path.read_bytes()]
