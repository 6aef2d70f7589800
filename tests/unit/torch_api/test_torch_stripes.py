"""The bytes of a state are shared out among those who send it: each once, and evenly."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from bagua.torch_api.comm.stripes import ALIGNMENT, Piece, length, packs, stripes

SIZES = st.lists(st.integers(0, 200), max_size=8)


def bytes_of(pieces):
    return [(piece.item, place) for piece in pieces for place in range(piece.begin, piece.end)]


@given(sizes=SIZES, senders=st.integers(1, 5), data=st.data())
def test_each_byte_is_sent_once_and_by_one_who_has_it(sizes, senders, data):
    only_first = data.draw(st.sets(st.sampled_from(range(len(sizes))))) if sizes else set()
    shares = stripes(sizes, senders, only_first)
    assert len(shares) == senders
    sent = Counter(one for share in shares for one in bytes_of(share))
    assert sent == Counter((item, place) for item, size in enumerate(sizes) for place in range(size))
    assert not any(piece.item in only_first for share in shares[1:] for piece in share)
    if not only_first:
        amounts = [len(bytes_of(share)) for share in shares]
        assert max(amounts) <= -(-sum(sizes) // senders)


@given(sizes=SIZES, limit=st.integers(1, 64))
def test_packs_hold_all_in_order_and_nothing_overlaps(sizes, limit):
    pieces = [Piece(item, 3, 3 + size) for item, size in enumerate(sizes) if size]
    cut = list(packs(pieces, limit))
    assert bytes_of([piece for pack in cut for _, piece in pack]) == bytes_of(pieces)
    for pack in cut:
        assert length(pack) <= limit
        end = 0
        for place, piece in pack:
            assert place >= end and place % ALIGNMENT == 0
            end = place + piece.end - piece.begin
