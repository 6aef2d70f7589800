"""Bytes that ranks tell each other when they enter a generation."""

from bagua.torch_api.comm.gather_bytes import MOST_SENDERS, SHORT, gather_texts, largest
from bagua.torch_api.job.session import current

HOSTS = ([0], [1, 2])
LENGTHS = (0, 1, SHORT - 1, SHORT, SHORT + 1, 5000)


def ranks_tell():
    session = current()
    rank, world = session.membership.rank, session.membership.world_size

    def of(number):
        """Texts of one rank: equal ones, different ones, and different ones of one rank alone. Some end in zeros."""
        same = [b"x" * length for length in LENGTHS]
        own = [bytes([number]) * length + bytes(3) for length in LENGTHS]
        return same + own + [bytes([number]) if number else b"y" * (SHORT + number + 1), b"" if number else b"z" * 99]

    for _ in range(2):
        assert gather_texts(session, of(rank)) == [of(number) for number in range(world)]
    assert largest(session, [rank, -rank, 7]) == [world - 1, 0, 7]


def test_all_ranks_get_all_texts(pools):
    pools(*HOSTS).run(ranks_tell)


def all_tell_long_texts():
    session = current()
    texts = [bytes([number]) * (SHORT + 10 + number) for number in range(session.membership.world_size)]
    told = gather_texts(session, [texts[session.membership.rank]])
    assert told == [[text] for text in texts]


def test_more_long_texts_than_are_sent_one_by_one(pools):
    pools(list(range(MOST_SENDERS + 1))).run(all_tell_long_texts)
