"""Accounts, tokens and what was tuned, as JSON documents. The keys are an interface: add, don't rename."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bagua.proto import account_pb2, job_pb2


def account_document(one: account_pb2.Account) -> dict[str, Any]:
    """The account behind a credential."""
    return {"name": one.name, "role": one.role, "namespace": one.namespace, "unix_user": one.unix_user}


def token_document(one: account_pb2.Token) -> dict[str, Any]:
    """A token without its secret."""
    times = {"created_at": one.created_at, "expires_at": one.expires_at, "revoked_at": one.revoked_at}
    return {"id": one.id, **account_document(one.account), "created_by": one.created_by, **times}


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
        "trials": [
            {
                "job_id": one.job_id,
                "step": one.step,
                "round": one.round,
                "setting": dict(one.setting),
                "against": dict(one.against),
                "ratio": one.ratio,
                "level": one.level,
                "seconds": one.seconds,
                "spread": one.spread,
                "exposed": one.exposed,
                "against_seconds": one.against_seconds,
                "against_spread": one.against_spread,
                "against_exposed": one.against_exposed,
                "steps": one.steps,
                "state": one.state,
                "reason": one.reason,
            }
            for one in found.trials
        ],
    }
