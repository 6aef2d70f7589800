"""Fetches archives of users' code from the coordinator, keeps them for later jobs, and unpacks them for each job.

What comes is checked before it is used: size and digest of the archive, then each name, kind and size in it.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import IO

from bagua.base.code_archive import MAX_FILES, MAX_UNPACKED_BYTES, link_leads_out, pieces_of, unsafe
from bagua.base.trees import remove_tree
from bagua.daemon.node.jobs.engine_host import in_thread
from bagua.daemon.node.ranks.launch import LaunchError
from bagua.daemon.node.rules.job_specification import Code

CACHE_BYTES = 1 << 30  # of the archives that are kept for later jobs
_COMING = ".coming-"
_LEFT_S = 3_600.0  # so long after its last byte nobody fetches a file any more
_HEADERS = 4_096  # bytes in a tar file beside a file's contents, at most
_COPY = 1 << 20

# A piece of the archive that a job needs: (job_id, piece). Raises LaunchError.
Ask = Callable[[str, int], Awaitable[bytes]]


class CodeCache:
    """Archives in ``folder``, by digest. Use from the event loop."""

    def __init__(self, folder: Path, ask: Ask, limit: int = CACHE_BYTES) -> None:
        self._folder = folder
        self._ask = ask
        self._limit = limit
        self._fetching: dict[str, asyncio.Lock] = {}

    async def prepare(self, job_id: str, code: Code, destination: Path, owner: tuple[int, int] | None = None) -> None:
        """Puts the files of the archive into the folder ``destination``, which is made unless it is there. ``owner``:
        user and group of all of it, if not this process's. Raises LaunchError with words, OSError.
        """
        if await in_thread(destination.is_dir):
            return
        path = await self._fetch(job_id, code)
        await in_thread(lambda: unpack_beside(path, destination, owner))

    async def _fetch(self, job_id: str, code: Code) -> Path:
        path = self._folder / f"{code.digest}.tar.gz"
        async with self._fetching.setdefault(code.digest, asyncio.Lock()):
            if not await in_thread(lambda: _holds(path, code)):
                await self._download(job_id, code, path)
                await in_thread(lambda: self._trim(path))
        self._fetching.pop(code.digest, None)
        return path

    async def _download(self, job_id: str, code: Code, path: Path) -> None:
        await in_thread(lambda: self._folder.mkdir(mode=0o700, exist_ok=True))
        number, name = await in_thread(lambda: tempfile.mkstemp(prefix=_COMING, dir=self._folder))
        try:
            with open(number, "wb") as file:
                size, digest = 0, hashlib.sha256()
                for piece in range(pieces_of(code.size)):
                    data = await self._ask(job_id, piece)
                    size += len(data)
                    if size > code.size or not data:
                        raise LaunchError(
                            "the coordinator sent another number of bytes of code than the job has [BG904]"
                        )
                    digest.update(data)
                    file.write(data)
            if size != code.size or digest.hexdigest() != code.digest:
                raise LaunchError(
                    "the code that the coordinator sent is not that of the job: its SHA-256 differs [BG904]"
                )
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise

    def _trim(self, keep: Path) -> None:
        """Deletes archives that were not used for longest, until the rest fits, and what an earlier daemon was fetching
        when it was killed.
        """
        for left in self._folder.glob(f"{_COMING}*"):
            if time.time() - left.stat().st_mtime > _LEFT_S:
                left.unlink(missing_ok=True)
        found = [(path.stat(), path) for path in self._folder.glob("*.tar.gz")]
        total = sum(status.st_size for status, _ in found)
        for status, path in sorted(found, key=lambda one: one[0].st_mtime):
            if total <= self._limit:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= status.st_size


def _holds(path: Path, code: Code) -> bool:
    """True if the archive is there, unharmed. It is marked as used now."""
    try:
        with path.open("rb") as file:
            good = hashlib.file_digest(file, "sha256").hexdigest() == code.digest
        os.utime(path)
    except OSError:
        return False
    return good


def unpack_beside(archive: Path, destination: Path, owner: tuple[int, int] | None = None) -> None:
    """Makes ``destination`` at once, with all files, or not at all. Raises LaunchError, OSError."""
    # On the same disk, so that it can be renamed.
    made = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=destination.parent))
    try:
        with tempfile.TemporaryFile(dir=destination.parent) as tar:  # not in /tmp, which may be small, or memory
            _decompress(archive, tar)
            tar.seek(0)
            _unpack(tar, made)
        made.chmod(0o700)
        if owner is not None:
            _give(made, owner)
        try:
            made.rename(destination)
        except OSError:
            if not destination.is_dir():  # else somebody was faster
                raise
    # RecursionError: of tarfile, for headers that belong to headers
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, RecursionError) as error:
        raise LaunchError(f"the code of the job can't be unpacked: {error} [BG904]") from error
    finally:
        remove_tree(made)


def _give(root: Path, owner: tuple[int, int]) -> None:
    """The folder itself last: until then nobody else can enter it, and change what is given."""
    for folder, folders, files in os.walk(root, topdown=False):
        for name in (*folders, *files):
            os.chown(os.path.join(folder, name), *owner, follow_symlinks=False)
    os.chown(root, *owner)


def _decompress(archive: Path, tar: IO[bytes]) -> None:
    """A file that grows without end ends here: what reads headers believes their sizes."""
    left = MAX_UNPACKED_BYTES + MAX_FILES * _HEADERS
    with gzip.open(archive, "rb") as packed:
        while data := packed.read(_COPY):
            left -= len(data)
            if left < 0:
                raise LaunchError(
                    f"the code of the job has more than {MAX_UNPACKED_BYTES >> 20} MiB when unpacked [BG904]"
                )
            tar.write(data)


def _unpack(tar: IO[bytes], root: Path) -> None:
    """Links are made when all files are written: so none is written through a link."""
    links: list[tuple[str, str]] = []
    left, count = MAX_UNPACKED_BYTES, 0
    folders: set[PurePosixPath] = set()
    with tarfile.open(fileobj=tar, mode="r:") as members:  # no compression: its size was limited before
        for member in members:
            count += 1
            left -= member.size
            if why := unsafe(member.name):
                raise LaunchError(f"the code of the job has {why}: {member.name[:200]!r} [BG904]")
            folders.update(PurePosixPath(member.name).parents[:-1])
            if count + len(folders) > MAX_FILES or left < 0:
                raise LaunchError(
                    f"the code of the job has more than {MAX_FILES} files and folders, or too many bytes [BG904]"
                )
            if member.issym():
                if link_leads_out(member.name, member.linkname):
                    raise LaunchError(
                        f"the code of the job has a link that leads out of it: {member.name[:200]!r} [BG904]"
                    )
                links.append((member.name, member.linkname))
            elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse():
                _write(members, member, root)
            else:
                raise LaunchError(
                    f"the code of the job has what is neither file nor link: {member.name[:200]!r} [BG904]"
                )
    at_links = {PurePosixPath(name) for name, _ in links}
    for name, target in links:
        if not at_links.isdisjoint(PurePosixPath(name).parents):  # it would be made wherever the other one leads
            raise LaunchError(f"the code of the job has a link below another link: {name[:200]!r} [BG904]")
        path = root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.symlink(target, path)
    for name, target in links:  # a chain of links may lead out where none of them does
        if not Path(os.path.realpath(root / name)).is_relative_to(os.path.realpath(root)):
            raise LaunchError(
                f"the code of the job has a link that leads out of it: {name[:200]!r} to {target[:200]!r} [BG904]"
            )


def _write(members: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    path = root / member.name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    source = members.extractfile(member)
    assert source is not None
    # A name that comes twice, or leads through a link, is an error.
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(number, "wb") as file:
        shutil.copyfileobj(source, file, _COPY)
        os.fchmod(file.fileno(), (member.mode & 0o777) | 0o600)  # no set-user-id; its owner can read and replace it
