"""Lets newcomers into a job: compares their programs with the others', and gives them the state.

``state_holders.py`` says when."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from bagua.base.errors import BaguaError
from bagua.torch_api.comm.gather_bytes import gather_rows, gather_texts
from bagua.torch_api.comm.state_copy import StateCopy
from bagua.torch_api.comm.step_state import Followers
from bagua.torch_api.job.session import Session

LOG = logging.getLogger("bagua")


class Unfit(BaguaError):
    """This newcomer can't join: its version or its program is another one, or state could not be taken over."""


class Carrier(Protocol):
    """State that newcomers take over from the others."""

    def describe(self) -> Any:
        """Properties that must be the same on all members, as plain data."""
        return None

    def difference(self, mine: Any, other: Any) -> str:
        """Says for people where this newcomer's description differs from that of another member."""
        return ""

    def give(self, tensors: list[torch.Tensor]) -> Any:
        """The state, as plain data; its tensors go to ``tensors``. Raises TypeError if that can't be."""
        ...

    def take(self, document: Any, tensors: list[torch.Tensor]) -> None:
        """On a newcomer: makes room for what another member gave. Tensors, which are filled later, go to ``tensors`` in
        the same order. May be called again."""
        ...

    def taken(self) -> None:
        """On a newcomer: the tensors are filled."""
        return


class Admission:
    """Admission of newcomers to one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        # Weak: what the program drops is not given to newcomers.
        self._carriers: weakref.WeakValueDictionary[str, Carrier] = weakref.WeakValueDictionary()
        self._counts: dict[str, int] = {}

    def carry(self, kind: str, carrier: Carrier, name: str = "") -> None:
        """Newcomers take this over, as long as somebody else holds it. Those of one ``kind`` have a ``name``, or come
        in the same order on all members."""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._carriers[f"{kind} {name or self._counts[kind]}"] = carrier

    def forget(self, carrier: Carrier) -> None:
        """Removes state that newcomers take over no more."""
        for name in [name for name, one in self._carriers.items() if one is carrier]:
            del self._carriers[name]

    def run(self, followers: Followers, extra: Mapping[str, Any], whole: Sequence[int]) -> dict[str, Any]:
        """All members of the generation call it. ``whole``: ranks that hold the state; ``extra``: more of it. Returns
        that of the first of them. Raises Unfit on a newcomer, which does not join then. With islands a rank's state is
        that of the ranks at its position of theirs."""
        rank = self._session.membership.rank
        newcomer = rank not in whole
        whole = [one for one in self._session.membership.alike if one in whole]
        carriers = dict(self._carriers)
        self._compare(followers.describe(), carriers, whole)
        try:
            followers.check(self._session.membership.world_size)
        except ValueError as error:
            self._refuse(f"There are too many ranks for a sampler. {error}", newcomer)
        tensors: list[torch.Tensor] = []
        document: dict[str, Any] = {}
        trouble = ""
        if not newcomer:
            document, trouble = self._give(carriers, tensors, extra)
        # One member tells it for all: state is the same on those that hold it.
        state = json.dumps(document).encode() if rank == min(whole) else b""
        # Trouble of any member reaches all, so that all refuse alike.
        texts = gather_texts(self._session, [trouble.encode(), state])
        if words := next((told for told, _ in texts if told), b"").decode():
            self._refuse(words, newcomer)
        told: dict[str, Any] = json.loads(texts[min(whole)][1])
        if newcomer:
            for name, one in carriers.items():
                one.take(told["carriers"][name], tensors)
        StateCopy(self._session, tensors, whole).run()
        if newcomer:
            for one in carriers.values():
                one.taken()
        return dict(told["extra"])

    def _refuse(self, words: str, newcomer: bool) -> None:
        """Newcomers leave, and others wait for that."""
        if newcomer:
            raise Unfit(words)
        LOG.warning("%s", words)
        gather_rows(self._session, b"\0")  # a collective that newcomers don't come to: it ends when they have left

    def _give(
        self, carriers: Mapping[str, Carrier], tensors: list[torch.Tensor], extra: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str]:
        """The state of this member, and why it can't be told: then nobody gets it, whichever member that is."""
        found = {}
        for name, one in carriers.items():
            try:
                found[name] = one.give(tensors)
            except Exception as error:  # of the program's, too: the others go on
                return {}, f"Nobody can join this job: the state of {name} can't be told. {error}"
        return {"carriers": found, "extra": extra}, ""

    def _compare(self, followers: Mapping[str, Any], carriers: Mapping[str, Carrier], whole: Sequence[int]) -> None:
        description = {
            "samplers": followers,
            "carriers": {name: one.describe() for name, one in carriers.items()},
        }
        text = json.dumps(description, sort_keys=True).encode()
        texts = [told[0] for told in gather_texts(self._session, [text])]
        if self._session.membership.rank in whole:
            return  # newcomers that differ leave
        other = json.loads(texts[min(whole)])
        mine = json.loads(text)
        if mine != other:
            raise Unfit(_difference(mine, other, carriers))


def _difference(mine: Mapping[str, Any], other: Mapping[str, Any], carriers: Mapping[str, Carrier]) -> str:
    have, others = [*mine["carriers"], *mine["samplers"]], [*other["carriers"], *other["samplers"]]
    if have != others:
        return (
            f"Its program has {', '.join(have) or 'nothing'}, and that of the others {', '.join(others) or 'nothing'}. "
            "All wrap the same models, make the same samplers and register the same states before they join."
        )
    for name, one in carriers.items():
        if mine["carriers"][name] != other["carriers"][name]:
            return f"Its {name} differs. {one.difference(mine['carriers'][name], other['carriers'][name])}"
    return (
        f"Its samplers were made as {mine['samplers']}, and those of the others as {other['samplers']}: all have the "
        "same dataset, and the same arguments."
    )
