"""Which versions of coordinator and daemon talk with each other."""

import pytest

from bagua.base.protocol import OLDEST, PROTOCOL, misfit


@pytest.mark.parametrize(("protocol", "oldest"), [(0, 0), (OLDEST, 1), (PROTOCOL, OLDEST), (PROTOCOL + 1, PROTOCOL)])
def test_neighbours_fit(protocol, oldest):
    assert misfit("1.2.3", protocol, oldest, "the daemon") == ""


def test_a_version_that_is_too_new_is_told_with_the_order_of_upgrades():
    words = misfit("9.0", PROTOCOL + 2, PROTOCOL + 1, "The coordinator at host:1")
    assert words.startswith("The coordinator at host:1 has bagua 9.0 ") and "upgrade this one first" in words


def test_a_version_that_is_too_old_is_told_with_the_order_of_upgrades(monkeypatch):
    monkeypatch.setattr("bagua.base.protocol.OLDEST", 5)
    words = misfit("", 0, 0, "The daemon on node a")
    assert words.startswith("The daemon on node a has bagua 0.1 ") and "upgrade it" in words
