"""Any combination of schedule, pattern, codec and place, as an algorithm."""

from __future__ import annotations

from typing import Any

from bagua.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua.algorithms.base import Algorithm
from bagua.algorithms.codec import Codec
from bagua.algorithms.decentralized import DecentralizedAlgorithm, LowPrecisionDecentralizedAlgorithm
from bagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

DECENTRALISED_MODES = ("shift_one", "ring")


def combine(
    synchronous: bool = True,
    centralised: bool = True,
    codec: Codec | str | None = None,
    everywhere: bool = False,
    **options: Any,
) -> Algorithm:
    """The algorithm that exchanges in this way.

    ===========  =============  ============================================================================
    synchronous  centralised    what it is
    ===========  =============  ============================================================================
    True         True           ``GradientAllReduceAlgorithm``: the mean of all ranks' gradients in each step
    True         False          ``DecentralizedAlgorithm("shift_one")``: the mean of weights in changing pairs; or, with
                                ``peer_selection_mode="ring"``, ``LowPrecisionDecentralizedAlgorithm``
    False        True           ``AsyncModelAverageAlgorithm("all")``: the mean of all weights, in the background
    False        False          ``AsyncModelAverageAlgorithm("shift_one")``: that of pairs, in the background
    ===========  =============  ============================================================================

    Args:
        synchronous: Every step waits for what it exchanges.
        centralised: All ranks have a part in one mean. False: each step has two (or, in a ring, three) ranks in it.
        codec: None, or what encodes: any of ``Codec``. Gradients are encoded themselves, weights as differences to what
            both ends hold.
        everywhere: False: inside a host everything travels as it is. True: encoded there, too.
        options: More arguments of the algorithm, such as ``communication_interval`` or ``sync_interval_ms``.

    What makes no sense is refused: ValueError with the reason, TypeError for an option that the algorithm does not
    have. That is: ``everywhere`` without a codec, or with ``hierarchical=True``; pairs or a ring with
    ``centralised=True``, all ranks with ``centralised=False``; a ring in the background.
    """
    found = Codec.of(codec)
    if everywhere and found is None:
        raise ValueError("everywhere=True without a codec makes no sense: nothing would be encoded anywhere. [BG304]")
    if everywhere and options.get("hierarchical"):
        raise ValueError(
            "everywhere=True with hierarchical=True makes no sense: the one encodes inside hosts, the other averages "
            "there as it is. Pass one of them. [BG304]"
        )
    if synchronous and centralised:
        _refuse_mode(options, "centralised=True with synchronous=True is an all-reduce of gradients")
        return GradientAllReduceAlgorithm(codec=codec, everywhere=everywhere, **options)
    mode = options.pop("peer_selection_mode", "all" if centralised else "shift_one")
    _check_mode(mode, centralised)
    if not synchronous:
        if mode == "ring":
            raise ValueError(
                "A ring in the background makes no sense: neighbours' replicas equal their owners' weights because all "
                "exchange after the same step. Use synchronous=True, or peer_selection_mode='shift_one'. [BG304]"
            )
        return AsyncModelAverageAlgorithm(peer_selection_mode=mode, codec=codec, everywhere=everywhere, **options)
    if mode == "ring":
        # A ring of ranks encodes inside hosts, too.
        if not everywhere and options.setdefault("hierarchical", True) is not True and found is not None:
            raise ValueError(
                "A ring of ranks (hierarchical=False) encodes everywhere: pass everywhere=True with it. [BG304]"
            )
        options.setdefault("hierarchical", False)
        return LowPrecisionDecentralizedAlgorithm(codec=codec, **options)
    options.setdefault("hierarchical", not everywhere)  # ``everywhere`` goes with pairs of ranks alone
    return DecentralizedAlgorithm(peer_selection_mode=mode, codec=codec, everywhere=everywhere, **options)


def _refuse_mode(options: dict[str, Any], reason: str) -> None:
    mode = options.pop("peer_selection_mode", "all")
    if mode != "all":
        raise ValueError(f"peer_selection_mode={mode!r} makes no sense here: {reason}. Pass centralised=False. [BG304]")


def _check_mode(mode: str, centralised: bool) -> None:
    if centralised and mode != "all":
        raise ValueError(
            f"peer_selection_mode={mode!r} with centralised=True makes no sense: centralised means that all ranks "
            "have a part in one mean. Pass centralised=False. [BG304]"
        )
    if not centralised and mode not in DECENTRALISED_MODES:
        raise ValueError(
            f"peer_selection_mode={mode!r} with centralised=False: choose one of {', '.join(DECENTRALISED_MODES)}; the "
            "mean of all ranks is centralised=True. [BG304]"
        )
