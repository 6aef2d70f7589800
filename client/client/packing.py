"""Packs a folder of code into an archive that the nodes of a job unpack."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import stat
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from bagua.base.code_archive import MAX_BYTES, MAX_DEPTH, MAX_FILES, MAX_UNPACKED_BYTES, link_leads_out, unsafe
from bagua.base.errors import ConfigError
from bagua.base.text import printable
from bagua.proto import common_pb2

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILE = ".baguaignore"  # Patterns as in .gitignore: what matches is not packed
# Where git does not say what belongs to the code.
DEFAULT_IGNORES = (
    ".git/ .hg/ .svn/ __pycache__/ *.pyc .venv/ venv/ .tox/ .nox/ node_modules/ *.egg-info/ .mypy_cache/ "
    ".pytest_cache/ .ruff_cache/ .ipynb_checkpoints/ .DS_Store"
).split()
# In a folder that is a virtual environment, whatever its name. It is never packed.
ENVIRONMENT = "pyvenv.cfg"
_NAMED = 5  # files in a message
_GIT_S = 60.0


@dataclass(frozen=True)
class Packed:
    """An archive. ``names``: of its files, sorted. ``data``: its bytes."""

    archive: common_pb2.CodeArchive
    names: tuple[str, ...]
    data: bytes

    def parts(self, size: int) -> Iterator[bytes]:
        """The bytes, in order, so many at a time."""
        for begin in range(0, len(self.data), size):
            yield self.data[begin : begin + size]

    def check_entry(self, folder: Path, entry: str) -> None:
        """Raises ConfigError if the script ``entry`` is not among the files."""
        name = os.path.normpath(entry)
        if name in self.names or os.path.join(name, "__main__.py") in self.names:
            return
        reason = "is ignored" if (folder / entry).exists() else "does not exist"
        if os.path.isabs(entry):
            reason = "is not below it: write its path from there"
        raise ConfigError(f"The script {printable(entry)} {reason} in the working directory {folder}. [BG815]")


def pack(folder: Path) -> Packed:
    """The files of ``folder``, but those that are ignored: in a git checkout what git ignores, elsewhere what
    .gitignore there says and ``DEFAULT_IGNORES``; what ``IGNORE_FILE`` says; and virtual environments. Modes are kept,
    owners and times are not. The same files give the same archive. Raises ConfigError with words: too much, a link
    out of the folder, a file that can't be read."""
    folder = folder.expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"The working directory {folder} {'is no folder' if folder.exists() else 'does not exist'}. [BG815]"
        )
    names = sorted(_without_ignored(folder, _of_git(folder)))
    sizes = _look_at(folder, names)
    if not sizes:
        raise ConfigError(f"The working directory {folder} has no files, or all of them are ignored. [BG815]")
    _check_size(folder, sizes)
    file = io.BytesIO()
    try:
        # No time and no name: the same files have the same digest.
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6, mtime=0, filename="") as packer:
            with tarfile.open(fileobj=packer, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for name in sizes:
                    _add(tar, folder, name)
                    if file.tell() > MAX_BYTES:  # too much already
                        break
    except OSError as error:
        raise ConfigError(f"The working directory {folder} can't be packed: {error}. [BG815]") from error
    data = file.getvalue()
    if len(data) > MAX_BYTES:
        raise ConfigError(_too_much(folder, sizes, f"more than {_mib(MAX_BYTES)} when they are compressed"))
    digest = hashlib.sha256(data).hexdigest()
    archive = common_pb2.CodeArchive(
        digest=digest, bytes=len(data), unpacked_bytes=sum(sizes.values()), files=len(sizes)
    )
    return Packed(archive, tuple(sizes), data)


def _of_git(folder: Path) -> list[str] | None:
    """Files that git has, or would add; None where ``folder`` is in no checkout, or there is no git."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "."]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"`git ls-files` in {folder} did not end within {_GIT_S:g} s. [BG815]") from error
    if done.returncode:
        return None
    found: list[str] = []
    # Git lists a file in conflict several times.
    for name in {os.fsdecode(one) for one in done.stdout.split(b"\0") if one}:
        path = folder / name
        if path.is_dir() and not path.is_symlink():  # a submodule
            found += [os.path.join(name.rstrip("/"), one) for one in _of_git(path) or ()]
        elif os.path.lexists(path):  # it may have been deleted, and not yet in git
            found.append(name)
    links = {name for name in found if (folder / name).is_symlink()}
    # Git may still have files of a folder that is a link by now: they are those of the folder to which it leads.
    return [name for name in found if links.isdisjoint(map(str, PurePath(name).parents))]


def _without_ignored(folder: Path, of_git: list[str] | None) -> Iterable[str]:
    if of_git is not None:  # which knows .gitignore by itself
        spec = _spec(folder, [], IGNORE_FILE)
        return [name for name in _outside_environments(of_git) if not _matches(spec, name)]
    spec = _spec(folder, DEFAULT_IGNORES, ".gitignore", IGNORE_FILE)
    found = []
    for path, folders, files in os.walk(folder):
        below = os.path.relpath(path, folder)
        if below.count(os.sep) >= MAX_DEPTH:
            raise ConfigError(
                f"The working directory {folder} has more than {MAX_DEPTH} folders in each other, in "
                f"{printable(below[:100])}: put that into {IGNORE_FILE}. [BG815]"
            )
        if ENVIRONMENT in files and below != ".":
            folders.clear()  # os.walk goes into those that are left in the list
            continue
        for name in list(folders):
            inside = os.path.normpath(os.path.join(below, name))
            if os.path.islink(os.path.join(path, name)):
                files.append(name)
            elif not _matches(spec, inside + "/"):
                continue
            folders.remove(name)
        found += [inside for name in files if not _matches(spec, inside := os.path.normpath(os.path.join(below, name)))]
        if len(found) > 10 * MAX_FILES:  # counted well enough for an error
            break
    return found


def _matches(spec: GitIgnoreSpec, name: str) -> bool:
    """Patterns see what is not UTF-8 in a name as question marks: some of pathspec's ways take nothing else."""
    return spec.match_file(name.encode(errors="replace").decode())


def _outside_environments(names: Sequence[str]) -> list[str]:
    """Returns the names that are not in a virtual environment below the root."""
    folders = (os.path.split(name)[0] for name in names if os.path.basename(name) == ENVIRONMENT)
    environments = tuple(f"{folder}/" for folder in folders if folder)
    return [name for name in names if not name.startswith(environments)]


def _spec(folder: Path, first: Sequence[str], *names: str) -> GitIgnoreSpec:
    """Makes the specification of what is left out: by the patterns ``first``, then by those of these files. Raises
    ConfigError for a pattern that means nothing.
    """
    from pathspec import GitIgnoreSpec

    patterns = list(first)
    for name in names:
        lines = _patterns(folder / name)
        try:
            GitIgnoreSpec.from_lines(lines)
        except ValueError as error:
            raise ConfigError(f"{folder / name}: {printable(str(error))}. [BG815]") from error
        patterns += lines
    return GitIgnoreSpec.from_lines(patterns)


def _patterns(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}. [BG815]") from error


def _look_at(folder: Path, names: Sequence[str]) -> dict[str, int]:
    """Bytes by name. Raises ConfigError for what can't be shipped."""
    sizes = {}
    for name in names:
        path = folder / name
        if why := unsafe(name):
            raise ConfigError(
                f"The working directory {folder} has {why}: {printable(name[:200])}. Give it another one, or put it "
                f"into {IGNORE_FILE}. [BG815]"
            )
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # somebody has deleted it since
        except OSError as error:
            raise ConfigError(f"{printable(str(path))} can't be read: {error.strerror}. [BG815]") from error
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(path)
            if link_leads_out(name, target) or not _is_inside(folder, path):
                raise ConfigError(
                    f"The link {printable(name)} leads out of the working directory, to {printable(target)}: nodes "
                    f"would not have it. Copy what it names, or put {printable(name)} into {IGNORE_FILE}. [BG815]"
                )
            sizes[name] = 0
        elif stat.S_ISREG(status.st_mode):
            sizes[name] = status.st_size
        else:
            raise ConfigError(f"{path} is neither a file nor a link. Put {printable(name)} into {IGNORE_FILE}. [BG815]")
    return sizes


def _is_inside(folder: Path, path: Path) -> bool:
    # The text of a link does not show other links on its way.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _check_size(folder: Path, sizes: dict[str, int]) -> None:
    folders = {parent for name in sizes for parent in PurePath(name).parents[:-1]}
    if len(sizes) + len(folders) > MAX_FILES:
        most = Counter(name.partition("/")[0] + "/" if "/" in name else "." for name in sizes)
        named = ", ".join(f"{printable(name)} ({count} files)" for name, count in most.most_common(_NAMED))
        raise ConfigError(
            f"The working directory {folder} has {len(sizes)} files that are not ignored, in {len(folders)} folders; "
            f"{MAX_FILES} is the most of both. "
            f"Most are in {named}. Put what the job does not need into {IGNORE_FILE}. [BG815]"
        )
    total = sum(sizes.values())
    if total > MAX_UNPACKED_BYTES:
        raise ConfigError(_too_much(folder, sizes, f"{_mib(total)}; {_mib(MAX_UNPACKED_BYTES)} is the most"))


def _too_much(folder: Path, sizes: dict[str, int], words: str) -> str:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED]
    named = ", ".join(f"{printable(name)} ({_mib(sizes[name])})" for name in largest)
    return (
        f"The files of the working directory {folder} have {words}. The largest: {named}. Put what the job does not "
        f"need into {IGNORE_FILE}, and data where the nodes can read it. [BG815]"
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _add(tar: tarfile.TarFile, folder: Path, name: str) -> None:
    info = tarfile.TarInfo(name)
    path = folder / name
    if path.is_symlink():
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
        tar.addfile(info)
        return
    with path.open("rb") as file:
        data = file.read(MAX_UNPACKED_BYTES + 1)  # it may have grown since it was looked at
        info.mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
