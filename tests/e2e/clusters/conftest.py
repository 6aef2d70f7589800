"""An sshd of the tests' own, for what starts hosts over ssh."""

import pytest
from rig.clusters.sshd import Sshd

# Without torch, whose import costs two seconds of a core.
TELL = """
    import os, sys
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["COLOUR"], sys.argv[1:], flush=True)
"""


@pytest.fixture(scope="session")
def sshd(tmp_path_factory):
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    try:
        yield server
    finally:
        server.close()
