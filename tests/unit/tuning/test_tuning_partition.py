"""The best cut into buckets: never worse than simple ones, and as good as an exhaustive search."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from bagua.tuning.network import Network
from bagua.tuning.partition import best_cuts, default_cuts, one_bucket, one_per_tensor
from bagua.tuning.predict import Cluster, Coding, predict_cuts
from bagua.tuning.profile import Gradient, StepProfile

NETWORKS = st.builds(Network, st.sampled_from([0.0, 1e7, 1e8, 1e9, 1e10]), st.sampled_from([0.0, 1e-4, 5e-3]))
CODINGS = st.sampled_from([None, Coding("minmax8"), Coding("onebit")])


@st.composite
def profiles(draw, most, dtypes=("float32",)):
    """Some parameters whose gradients come at any moment of backward."""
    count = draw(st.integers(1, most))
    sizes = draw(st.lists(st.sampled_from([0, 10, 1000, 50_000, 400_000, 3_000_000]), min_size=count, max_size=count))
    gaps = draw(st.lists(st.integers(0, 20_000_000), min_size=count, max_size=count))
    kinds = draw(st.lists(st.sampled_from(dtypes), min_size=count, max_size=count))
    came = list(itertools.accumulate(gaps))
    parameters = tuple(
        Gradient(f"p{number}", kind, size, ready)
        for number, (kind, size, ready) in enumerate(zip(kinds, sizes, came, strict=True))
    )
    return StepProfile(parameters, 1_000_000, came[-1] + draw(st.integers(0, 10**7)), 0, cores=draw(st.integers(1, 3)))


@settings(deadline=None, max_examples=60)
@given(profiles(40, ("float32", "bfloat16")), NETWORKS, st.integers(1, 9), st.integers(1, 3), CODINGS)
def test_never_worse_than_simple_cuts(profile, network, hosts, ranks, coding):
    cuts = best_cuts(profile, network, hosts, ranks, coding)
    assert sorted(name for names in cuts for name in names) == sorted(one.name for one in profile.parameters)
    dtype = {one.name: one.dtype for one in profile.parameters}
    assert all(len({dtype[name] for name in names}) == 1 for names in cuts)
    cluster = Cluster.of(profile, network, hosts, ranks)
    best = predict_cuts(profile, cluster, cuts, coding).exposed_s
    for other in (one_bucket(profile), one_per_tensor(profile), default_cuts(profile)):
        assert best <= predict_cuts(profile, cluster, other, coding).exposed_s


@settings(deadline=None, max_examples=60)
@given(profiles(7), NETWORKS, st.integers(1, 9), CODINGS)
def test_as_good_as_an_exhaustive_search(profile, network, hosts, coding):
    names = [one.name for one in profile.parameters]
    cluster = Cluster.of(profile, network, hosts)
    every = []
    for cut_after in itertools.product((False, True), repeat=len(names) - 1):
        cuts = [[names[0]]]
        for name, cut in zip(names[1:], cut_after, strict=True):
            if cut:
                cuts.append([])
            cuts[-1].append(name)
        every.append(predict_cuts(profile, cluster, cuts, coding).exposed_s)
    found = predict_cuts(profile, cluster, best_cuts(profile, network, hosts, coding=coding), coding).exposed_s
    assert abs(found - min(every)) <= 1e-12
