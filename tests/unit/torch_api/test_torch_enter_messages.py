"""Members of a job tell each other where they stand: what many of them say travels once."""

from bagua.torch_api.comm.gather_bytes import MOST_SENDERS, senders_of


def test_the_first_of_those_that_say_the_same_sends_it():
    assert senders_of([b"a"] * 1000) == [0]
    assert senders_of([b"b", b"a", b"b", b"c", b"a"]) == [0, 1, 3]


def test_where_all_say_something_else_all_send():
    keys = [bytes([number]) for number in range(MOST_SENDERS)]
    assert senders_of(keys) == list(range(MOST_SENDERS))
    assert senders_of([*keys, b"another"]) is None
