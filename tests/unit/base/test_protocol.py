"""Which versions of coordinator and daemon talk with each other."""

import pytest

from bagua.base.protocol import OLDEST, PROTOCOL, misfit


@pytest.mark.parametrize(("protocol", "oldest"), [(0, 0), (OLDEST, 1), (PROTOCOL, OLDEST), (PROTOCOL + 1, PROTOCOL)])
def test_neighbours_fit(protocol, oldest):
    assert misfit("1.2.3", protocol, oldest, "the daemon") == ""
