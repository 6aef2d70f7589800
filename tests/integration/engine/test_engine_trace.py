"""Engines record the phases of their operations while somebody asks for it."""

REQUEST = 7 << 16 | 3
CALL = ["allreduce", "float32", {"count": 70_001, "label": "bucket 3"}]


def test_phases_between_hosts(make_world):
    """Spans of an operation lie inside it, or right at its edge."""
    world = make_world([[0, 1], [2]], chunk_bytes=16384)
    for engine in world.engines:
        engine.start_trace(request=REQUEST, most=10_000)
    world.run("call", calls=[[CALL, CALL]] * 3)
    for index, engine in enumerate(world.engines):
        spans, dropped = engine.stop_trace()
        assert dropped == 0 and engine.stop_trace() == ([], 0)
        operations = {(comm, sequence): times for phase, _, comm, sequence, *times in spans if phase == "operation"}
        assert len(operations) == 2
        for _, name, comm, sequence, begin, end, _, _ in spans:
            first, last, *_ = operations[comm, sequence]
            assert name == "bucket 3" and first <= begin <= end <= last
        phases = {phase for phase, *_ in spans}
        assert phases >= {"operation", "queued", "reduce", "send", "receive"}
        assert {peer for phase, *_, peer, _ in spans if phase in ("send", "receive", "host")} == {1 - index}
        assert ("ranks" in phases) == (index == 0)
        assert {peer for phase, *_, peer, _ in spans if phase == "ranks"} <= {0, 1}
        assert sum(size for phase, *_, size in spans if phase == "send") >= 2 * 4 * 70_001 // 2


def test_phases_inside_a_host_and_their_limit(make_world):
    world = make_world([[0, 1]])
    world.engines[0].start_trace(request=REQUEST, most=4)
    world.run("call", calls=[[CALL] * 4] * 2)
    spans, dropped = world.engines[0].stop_trace()
    assert len(spans) == 4 and dropped > 0
    assert {phase for phase, *_ in spans} <= {"operation", "ranks", "reduce"}
