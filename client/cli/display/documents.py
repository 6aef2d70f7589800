"""Accounts, tokens and what was tuned, as JSON documents. The keys are an interface: add, don't rename."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from bagua.proto import account_pb2, job_pb2

_TRIAL = (
    *("job_id", "step", "round", "setting", "against", "ratio", "level", "seconds", "spread", "exposed"),
    *("against_seconds", "against_spread", "against_exposed", "steps", "state", "reason"),
)


def account_document(one: account_pb2.Account) -> dict[str, Any]:
    """The account behind a credential."""
    return fields(one, "name", "role", "namespace", "unix_user")


def token_document(one: account_pb2.Token) -> dict[str, Any]:
    """A token without its secret."""
    more = fields(one, "created_by", "created_at", "expires_at", "revoked_at")
    return {"id": one.id, **account_document(one.account), **more}


def tuning_document(found: job_pb2.Tuning) -> dict[str, Any]:
    """Makes the document of all that was tried. Times are in seconds."""
    return {
        "id": found.id,
        "model": found.study.model_text,
        "network": found.study.network_text,
        "settled": found.settled,
        "best": dict(found.best),
        "line": found.line,
        "job_id": found.job_id,
        "updated_at": found.updated_at,
        "tried": found.tried,
        "trials": [fields(one, *_TRIAL) for one in found.trials],
    }


def fields(message: Message, *names: str) -> dict[str, Any]:
    """Values of these fields of a message, by their names; of all fields if none is named."""
    values = {name: getattr(message, name) for name in names or (field.name for field in message.DESCRIPTOR.fields)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
