"""The program of docs/learning-rate.md: the learning rate follows the ranks through a loss and a join."""

import re

import pytest
from rig.docs import pages
from rig.limits import SOON_S

PAGE = "docs/learning-rate.md"


@pytest.mark.full  # unit/torch_api/data/test_learning_rate.py
def test_the_rate_follows_the_ranks(core, sandbox):
    pages.write_files(PAGE, sandbox.folder)
    [command] = pages.run_by("test_the_rate_follows_the_ranks", PAGE)
    done = sandbox.bagua(*command.split()[1:], deadline=3 * SOON_S)
    assert done.code == 0, done.text
    said = re.findall(r"rank (\d) of (\d): learning rate (\S+)", done.out)
    assert said[0] == ("0", "1", "0.05"), done.text
    assert sorted(said[1:]) == [("0", "2", "0.1"), ("1", "2", "0.1")], done.text
