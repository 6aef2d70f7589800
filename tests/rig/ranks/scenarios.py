"""Scenarios that run on the same ranks, one after the other; each rank says on standard output which went well."""


def check_passed(outputs, name):
    """It went well on all ranks."""
    everything = "\n".join(f"rank {rank}:\n{output}" for rank, output in enumerate(outputs))
    assert all(f"passed {name}\n" in output for output in outputs), everything  # the cause may lie in another rank
