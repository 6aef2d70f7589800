"""torch's own tests for backends pass: torch_suite.py runs them, torch-suite.md lists them."""

import re
from pathlib import Path

import pytest
import torch
from torch_suite import RANKS, outcome_of, run_suite

pytest.importorskip("expecttest", reason="torch's suite needs expecttest")
LIST = Path(__file__).with_name("torch-suite.md")
PASSED = re.findall(r"^\| `(test_\w+)` \| passed", LIST.read_text(), re.MULTILINE)
REPRESENTATIVES = re.compile(
    "test_(all_reduce_sum|all_reduce_coalesced_sum|broadcast|all_gather|all_gather_coalesced_simple|gather|scatter|"
    "reduce_sum|barrier|isend|irecv|send_recv_any_source|send_recv_with_tag|batch_isend_irecv_gloo|scatter_object_list|"
    "all_gather_object_default_pg|sparse_all_reduce_sum|DistributedDataParallelCPU|static_graph_api_cpu|get_future|"
    "accumulate_gradients_no_sync|destroy_group|barrier_timeout_full_group)"
)


def check(ranks, names, folder, deadline_s):
    started = ranks.start(run_suite, RANKS, names=names, folder=str(folder))
    ranks.wait(deadline_s)
    found = outcome_of([rank.output for rank in started])
    assert {name: text for name, text in found.items() if text != "passed"} == {}
    assert list(found) == names, [rank.output for rank in started]


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the list is of torch 2.13's suite")
def test_what_each_operation_rests_on(ranks, tmp_path):
    names = [name for name in PASSED if REPRESENTATIVES.fullmatch(name)]
    assert len(names) > 15
    check(ranks, names, tmp_path, 280)


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the list is of torch 2.13's suite")
def test_all_that_gloo_passes(ranks, tmp_path):
    check(ranks, PASSED, tmp_path, 2300)
