"""The Unix user of ranks, and the folder in which they meet the daemon."""

import asyncio
import os
import pwd
import shutil
import stat
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bagua.base.errors import ConfigError
from bagua.daemon.node.jobs.rank_service import OneJob
from bagua.daemon.node.ranks.launch import LaunchError
from bagua.daemon.node.ranks.places import open_user_places
from bagua.daemon.node.ranks.user import RunAs
from bagua.daemon.node.rules.job_specification import JobSpecification, Program

OTHER = next(user for user in pwd.getpwall() if user.pw_uid != 0)
JOB = JobSpecification("job-1", 1, 0, (), Program("/bin/true"), False, b"", "", 0, 1.0, 1.0, unix_user=OTHER.pw_name)
RUN_AS = RunAs(Path("/nowhere"), umask=0o027, limits=((1, 2, 3),))


def test_the_user_of_a_job():
    user = RUN_AS.user_of(JOB)
    assert (user.name, user.uid, user.gid, user.home) == (OTHER.pw_name, OTHER.pw_uid, OTHER.pw_gid, OTHER.pw_dir)
    assert OTHER.pw_gid in user.groups
    assert user.spawn == (user.uid, user.gid, user.groups, 0o027, ((1, 2, 3),))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unix_user": ""}, "this job has none"),
        ({"unix_user": "no-such-user"}, "there is no Unix user no-such-user on this node"),
        ({"unix_user": "root"}, "which is root: not without --allow-root"),
        ({"adopt": True}, "started by others"),
    ],
)
def test_jobs_that_may_not_run(changes, words):
    with pytest.raises(LaunchError, match=words):
        RUN_AS.user_of(replace(JOB, **changes))


def test_root_where_it_is_allowed():
    assert replace(RUN_AS, allow_root=True).user_of(replace(JOB, unix_user="root")).uid == 0


def test_what_is_roots_is_not_in_the_environment():
    root = {"HOME": "/root", "USER": "root", "XDG_CACHE_HOME": "/root/c", "TMPDIR": "/root/t", "BAGUA_RUN_AS": "x"}
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "BAGUA_ALGORITHM": "none"}
    found = RUN_AS.user_of(JOB).environment({**root, "BAGUA_TOKEN_FILE": "/root/token", **kept})
    own = {"USER": OTHER.pw_name, "LOGNAME": OTHER.pw_name, "HOME": OTHER.pw_dir, "SHELL": OTHER.pw_shell or "/bin/sh"}
    assert found == {**kept, **own}


@pytest.fixture
def folder():
    made = Path(tempfile.mkdtemp(prefix="bgp-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_job_has_a_folder_through_which_others_pass(folder):
    own = replace(RUN_AS.user_of(JOB), uid=os.geteuid(), gid=os.getegid())
    places = open_user_places(folder / "ranks", folder)
    place = places.of("job-1")
    place.make(own)
    place.make(own)  # a daemon that was started again
    assert place.meeting is not None and place.cache is not None
    assert [mode(path) for path in (folder / "ranks", place.folder.parent, place.folder)] == [0o711] * 3
    assert mode(place.meeting) == 0o700
    assert place.variables == {"BAGUA_MEETING_DIR": str(place.meeting), "BAGUA_SHARED_CACHE_DIR": str(place.cache)}
    (place.folder / "job-x.sock").touch()
    places.of("job-2").make(own)
    (left,) = places.recover({"job-1"})
    assert left.parent == place.folder.parent and (left / "meeting").is_dir()
    assert place.meeting.is_dir() and not (place.folder / "job-x.sock").exists()
    assert not places.of("job-2").folder.exists()
    (left,) = places.leave("job-1")
    assert not place.folder.exists() and (left / "meeting").is_dir()


def test_native_code_is_there_for_all_to_read(folder):
    built = folder / "own" / "core" / "key" / "core.so"
    built.parent.mkdir(parents=True, mode=0o700)
    built.write_text("code")
    place = open_user_places(folder / "ranks", folder).of("job-1")
    (found,) = place.publish([built])
    assert place.publish([built]) == [found]
    assert place.cache is not None and found == place.cache / "core" / "key" / "core.so" and found.read_text() == "code"
    assert [mode(path) for path in (found, found.parent, place.cache)] == [0o755] * 3
    open_user_places(folder / "ranks", folder).recover(())
    assert found.exists()


def test_folders_that_can_not_be_used(folder):
    (folder / "link").symlink_to(folder)
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=rf"can't pass through {closed}"):
        open_user_places(closed / "ranks", folder)
    with pytest.raises(ConfigError, match="somebody else made it"):
        open_user_places(folder / "link", folder)


def test_a_socket_of_one_job_leads_to_no_other():
    async def arrival(job_id):
        return job_id

    jobs = SimpleNamespace(find=lambda job_id: job_id, arrival=arrival)
    one = OneJob(jobs, "job-1")
    assert (one.find("job-1"), one.find("job-2")) == ("job-1", None)
    assert asyncio.run(one.arrival("job-1")) == "job-1" and asyncio.run(one.arrival("job-2")) == ""
