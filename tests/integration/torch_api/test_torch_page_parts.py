"""Parts of programs on pages, on forked ranks: each block runs to its end (``rig/docs/page_parts.py``)."""

import os

import pytest
from rig.docs import page_parts, pages

import bagua.torch_api as bagua
from bagua.torch_api.job.environment import find_free_network_port

RANKS = 3
"""The page of layers sends rows to three."""
ELSEWHERE = ("docs/frameworks.md", "docs/moving/bagua.md")
"""``integration/frameworks/test_lightning.py`` runs these."""


def rank_parts(folder):
    os.chdir(folder)
    bagua.init_process_group()
    return {page: page_parts.run_page(page, world) for page, world in page_parts.WORLDS.items()}


def rank_part_alone(page):
    return page_parts.run_page(page, page_parts.ALONE[page])


def test_parts_run(ranks, tmp_path):
    found = ranks.run(rank_parts, RANKS, folder=str(tmp_path))
    assert all(found[0].values()), "a page without parts needs no names"
    assert all((tmp_path / f"profile-{rank}.json").exists() for rank in range(RANKS))


@pytest.mark.parametrize("page", page_parts.ALONE)
def test_a_part_that_brings_up_torch_distributed_runs(ranks, page):
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
    assert ranks.run(rank_part_alone, 2, environment=environment, page=page) == [1, 1]


def test_pages_with_parts_are_known():
    assert {*page_parts.WORLDS, *page_parts.ALONE, *ELSEWHERE} == {*pages.PARTS}
