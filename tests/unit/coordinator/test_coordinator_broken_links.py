"""Elastic jobs whose hosts all reach the coordinator, and can't all talk with each other."""

import copy
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig.coordinator.elastic_job import OPTIONS, Cluster, killed

from bagua.daemon.coordinator.rules.broken_links import pairs_between, put_out
from bagua.daemon.coordinator.rules.domain import HostRecord, JobState, Phase, Plan, RankRecord
from bagua.daemon.coordinator.rules.joins import growth

# ---- who is put out


def hosts_of(*ranks, newcomers=""):
    """Hosts a, b, ... with so many ranks each."""
    return [
        HostRecord(
            place,
            name := chr(ord("a") + place),
            "",
            "",
            "",
            0,
            count,
            ranks=tuple(RankRecord(local, local, name, newcomer=name in newcomers) for local in range(count)),
        )
        for place, count in enumerate(ranks)
    ]


def links(text):
    return [(pair[0], pair[1]) for pair in text.split()]


@pytest.mark.parametrize(
    ("ranks", "newcomers", "broken", "out"),
    [
        ((2, 2), "", "ab", "b"),
        ((2, 2, 2), "", "ba bc bd", "b"),  # a host that is in no generation is nobody's concern
        ((1, 4, 1), "", "ab", "a"),  # the larger rest
        ((2, 2, 2), "", "ab", "b"),  # rank 0 stays
        ((2, 2, 2), "a", "ab", "a"),  # who holds the state stays
        ((2, 2, 2, 2), "", "ac ad bc bd", "cd"),  # a network that falls apart
        ((2, 2, 2, 2, 2), "", "ac ad ae bc bd be", "ab"),
        ((2, 2, 2, 2), "", "ab cd", "bd"),
        ((2, 2, 2, 2, 2), "", "ab bc cd de", "bd"),
        ((2, 2, 2), "", "ab bc ac", "bc"),  # nobody reaches anybody
        ((2, 2, 2), "bc", "ab ac", "bc"),  # newcomers alone can't go on
        ((2, 2, 2), "", "", ""),
    ],
)
def test_the_fewest_hosts_leave(ranks, newcomers, broken, out):
    hosts = hosts_of(*ranks, newcomers=newcomers)
    assert put_out(hosts, links(broken)) == tuple(out)
    assert put_out(hosts, [(other, one) for one, other in reversed(links(broken))]) == tuple(out), "in either direction"


@st.composite
def broken_networks(draw, most=7):
    ranks = draw(st.lists(st.integers(1, 4), min_size=2, max_size=most))
    hosts = hosts_of(*ranks)
    names = [host.node_id for host in hosts]
    new = draw(st.sets(st.sampled_from(names), max_size=len(names) - 1))
    pairs = draw(st.lists(st.sampled_from(list(combinations(names, 2))), unique=True))
    return hosts_of(*ranks, newcomers="".join(new)), pairs


@given(broken_networks())
@settings(max_examples=100, deadline=None)
def test_the_rest_can_talk_and_nothing_smaller_would_do(network):
    hosts, pairs = network
    out = set(put_out(hosts, pairs))
    assert tuple(sorted(out)) == put_out(hosts, list(reversed(pairs)))
    holders = {host.node_id for host in hosts if not host.new}

    def possible(chosen):
        return bool(holders - chosen) and all(chosen & set(pair) for pair in pairs)

    assert possible(out)
    names = [host.node_id for host in hosts]
    ranks = {host.node_id: host.nranks for host in hosts}
    for size in range(len(out) + 1):
        found = [set(one) for one in combinations(names, size) if possible(set(one))]
        if found:
            assert len(out) == size
            assert sum(ranks[name] for name in out) == min(sum(ranks[name] for name in one) for one in found)
            break


@pytest.mark.parametrize("count", [60, 200])
def test_large_networks_are_parted_in_time(count):
    """Each third one reaches none of the others: the smaller side leaves. And a chain, which has no better side."""
    hosts = [replace(host, node_id=f"n{place:03}") for place, host in enumerate(hosts_of(*[1] * count))]
    names = [host.node_id for host in hosts]
    away = names[::3]
    assert put_out(hosts, [(one, other) for one in away for other in set(names) - set(away)]) == tuple(away)
    chain = list(pairwise(names))
    out = set(put_out(hosts, chain))
    assert len(out) < 0.7 * count and not pairs_between(chain, set(names) - out)


# ---- and when


def stall(c, *broken, passes=0):
    """The hosts of each of these links lose each other; all others hear of it."""
    accused = {host.node_id: [] for host in c.job.hosts}
    for one, other in links(" ".join(broken)):
        accused[one].append(other)
        accused[other].append(one)
    for name, others in accused.items():
        lost = tuple(others) or (broken[0][0],)
        c.says(name, suspended="no answer", suspended_nodes=lost, accused=tuple(others), passes=passes)
    c.decide()
    assert c.wake() is not None
    c.decide(OPTIONS.regroup_s)


def ended(c):
    """Nothing is left of the parts that are out."""
    c.job = replace(c.job, former=tuple(replace(part, phase=Phase.STOPPED) for part in c.job.former))


def test_a_broken_link_parts_a_job_at_the_second_stall():
    c = Cluster("abc")
    stall(c, "bc", passes=7)
    assert (c.job.generation, c.job.stalls) == (2, 1) and len(c.job.hosts) == 3, "it may pass"
    c.enter()
    stall(c, "bc", passes=8)  # ranks may have stood between two passes
    assert c.members() == [("a", [0, 1]), ("b", [2, 3])]
    assert c.job.reason == "generation 3: node c is put out, since nothing passes between it and b; 4 ranks go on"
    assert c.job.state is JobState.RUNNING and not c.job.accusations


def restart(c, began, passes=7):
    """The daemons of these nodes are killed, and started again."""
    for host in c.job.hosts:
        if host.node_id in began:
            c.says(host.node_id, suspended="its daemon was killed", accused=(host.node_id,))
        else:
            lost = tuple(began)
            c.says(
                host.node_id, suspended="it closed the connection", suspended_nodes=lost, accused=lost, passes=passes
            )
    c.decide()
    c.decide(OPTIONS.regroup_s)


def test_daemons_that_were_started_again_are_no_broken_links():
    """An upgrade replaces one after the other, and no step is made in between."""
    c = Cluster("abcd", most=4)
    for began in "abcdabcd":
        restart(c, began)
        c.enter()
    assert len(c.members()) == 4 and c.job.generation == 9 and not c.job.stalls


def test_a_daemon_that_is_killed_in_each_step_leaves():
    c = Cluster("ab")
    for number in range(OPTIONS.max_stalls):
        restart(c, "b")
        assert len(c.members()) == 2 and c.job.generation == number + 2
        c.enter()
    restart(c, "b")
    assert c.members() == [("a", [0, 1])]
    words = f"the daemon on node b was started again {OPTIONS.max_stalls + 1} times in a row, and no step was made"
    assert c.job.reason == f"generation {OPTIONS.max_stalls + 2}: {words} meanwhile; 2 ranks go on"
    assert [(name, round(until - c.now)) for name, _, until in c.job.put_out] == [("b", 120)]


def test_daemons_that_are_killed_while_steps_are_made_stay():
    c = Cluster("ab")
    for number in range(20):
        restart(c, "b", passes=number)
        c.enter()
    for _ in range(20):  # nobody tells of steps where all daemons are killed
        restart(c, "ab")
        c.enter()
    assert len(c.members()) == 2 and c.job.state is JobState.RUNNING


def test_it_is_waited_for_all_to_speak():
    c = Cluster("abcd")
    stall(c, "ac", "ad", "bc", "bd")
    c.enter()
    c.says("a", suspended="no answer", suspended_nodes=("c", "d"), accused=("c", "d"))
    c.says("c", suspended="no answer", suspended_nodes=("a",), accused=("a",))
    c.says("d", suspended="no answer", suspended_nodes=("a",), accused=("a",))
    c.decide(1.0)
    assert c.job.generation == 2, "b has said nothing"
    c.says("b", suspended="no answer", suspended_nodes=("c",), accused=("c", "d"))
    c.decide(1.0)
    assert [name for name, _ in c.members()] == ["a", "b"]


def test_a_link_that_drops_while_steps_are_made_harms_nobody():
    c = Cluster("ab")
    for number in range(200):
        c.now += 50
        stall(c, "ab", passes=2 * number + 5)
        assert (c.job.state, c.job.generation, len(c.job.hosts)) == (JobState.RUNNING, number + 2, 2)
        c.enter()
    stall(c, "ab", passes=2 * 199 + 6)
    assert len(c.job.hosts) == 1, "none since"


def test_a_rest_that_stalls_again_is_parted_at_once():
    """The healthy one of two hosts that can't talk may have gone."""
    c = Cluster("abc")
    for _ in range(2):
        stall(c, "ab", passes=7)
        c.enter()
    assert [name for name, _ in c.members()] == ["a", "c"]
    stall(c, "ac", passes=7)
    assert len(c.members()) == 1


def test_programs_without_a_model_of_ours_tell_of_no_steps():
    """They have a minute, and eight steps more where these take long."""
    c = Cluster("ab")
    c.says("a", patience_s=100.0)
    for _ in range(3):
        c.now += OPTIONS.stall_s + 100
        stall(c, "ab")
        assert c.job.stalls == 1
        c.enter()
    c.now += OPTIONS.stall_s + 90
    stall(c, "ab")
    assert len(c.job.hosts) == 1


def test_newcomers_hide_no_broken_link():
    """They are ready between two stalls, and no step is made: they enter when there was time enough for steps."""
    c = Cluster("ab", most=3)
    stall(c, "ab", passes=7)
    c.enter()
    c.there("c")
    c.decide()
    c.says("c")
    c.ready("c")
    assert [name for name, _ in c.members()] == ["a", "b"] and c.joining() and c.wake() is not None
    later = copy.deepcopy(c)
    stall(c, "ab", passes=7)
    assert [name for name, _ in c.members()] == ["a"], "both stalls count"
    c.enter()
    assert [name for name, _ in c.members()] == ["a"], "the link may be that of a"
    c.decide(c.wake() - c.now)
    assert [name for name, _ in c.members()] == ["a", "c"]
    later.decide(later.wake() - later.now)
    assert [name for name, _ in later.members()] == ["a", "b", "c"], "no word of steps, but time enough for them"


def test_a_newcomer_that_dies_ends_no_stall():
    c = Cluster("ab", most=3)
    c.there("c")
    c.decide()
    c.ready("c")
    assert c.job.plan is Plan.PLANNED
    c.job = replace(c.job, stalls=1, accusations=(("a", "b"),))  # of the generation before
    c.says("c", killed(4), killed(5))
    c.decide()
    assert [name for name, _ in c.members()] == ["a", "b"]
    assert (c.job.stalls, c.job.accusations) == (1, (("a", "b"),))


def test_who_was_put_out_comes_back_later_and_later():
    """The link stays broken: the host is asked again after two minutes, then four, and so on up to an hour."""
    c = Cluster("abc", most=3)
    for _ in range(2):
        stall(c, "bc")
        c.enter()
    pauses = []
    for _ in range(6):
        assert [name for name, _ in c.members()] == ["a", "b"]
        since = c.now
        ended(c)
        assert "c was put out" in growth(c.job, c.views, c.now)
        at = c.wake()
        assert at is not None
        c.decide(at - c.now)
        pauses.append(round(at - since))
        assert [name for name, _ in c.joining()] == ["c"]
        c.says("c")
        c.ready("c")
        assert c.job.plan is Plan.PLANNED and [name for name, _ in c.members()] == ["a", "b", "c"]
        c.enter(newcomers=True)
        stall(c, "bc")
        c.enter()
    assert pauses == [120, 240, 480, 960, 1920, 3600]


def come_back(passes):
    """A job in which c was put out, and has joined again after so many passes."""
    c = Cluster("abc", most=3)
    for _ in range(2):
        stall(c, "bc", passes=7)
        c.enter()
    ended(c)
    c.decide(120.0)
    c.says("c")
    c.ready("c")
    c.says("a", entered=c.job.generation, passes=passes)
    c.enter(newcomers=True)
    return c


def test_who_was_put_out_and_trains_again_is_put_out_by_no_single_stall():
    """Its switch restarts, hours later: nothing passes between any two hosts for a moment."""
    c = come_back(passes=12)
    stall(c, "ab", "bc", "ac", passes=14)
    assert (len(c.job.hosts), c.job.stalls) == (3, 1)
    c.enter()
    stall(c, "bc", passes=14)
    assert len(c.job.hosts) == 1, "what was seen in the first stall counts"


def test_who_comes_back_over_a_broken_link_gets_no_second_try():
    """The steps that were made without it are no progress of it."""
    c = come_back(passes=40)
    stall(c, "bc", passes=41)
    assert [name for name, _ in c.members()] == ["a", "b"]


def test_a_job_that_would_end_without_a_host_tries_again():
    """Its program takes no newcomers, and needs all: the links may be back."""
    c = Cluster("ab", least=2, most=2, takes=False)
    for number in range(1, OPTIONS.max_stalls + 1):
        stall(c, "ab", passes=7)
        assert (c.job.state, c.job.stalls, len(c.job.hosts)) == (JobState.RUNNING, number, 2)
        c.enter()
    stall(c, "ab", passes=9)
    assert (c.job.state, c.job.stalls) == (JobState.RUNNING, 1), "a step was made"
    for _ in range(OPTIONS.max_stalls):
        c.enter()
        stall(c, "ab", passes=8)
    assert c.job.state is JobState.STOPPING
    assert "node b is put out, since nothing passes between it and a" in c.job.reason
    assert "its program takes no newcomers" in c.job.reason
