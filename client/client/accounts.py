"""Calls about accounts, as ``client.accounts`` has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from bagua.proto import account_pb2, account_pb2_grpc

PAGE = 1_000  # entries of the audit log in one answer


class Accounts:
    """Tokens and the audit log of a coordinator. All methods raise ServiceError with words: ForbiddenError where the
    caller is no administrator. ``call``: a call of the client's, with its errors."""

    def __init__(self, channel: grpc.Channel, call: Callable[[Any, Any], Any]) -> None:
        self._stub = account_pb2_grpc.AccountServiceStub(channel)
        self._call = call

    def whoami(self) -> account_pb2.Account:
        """The account behind this client's credential."""
        found: account_pb2.Account = self._call(self._stub.WhoAmI, account_pb2.WhoAmIRequest())
        return found

    def create(
        self, name: str, role: str, namespace: str = "", lasts_s: float = 0.0, unix_user: str = ""
    ) -> account_pb2.CreateTokenReply:
        """A new token, with the secret that is told this once. ``role``: admin, submit, read or node; ``lasts_s``: 0 is
        for ever; ``unix_user``: of its jobs, where daemons run ranks as their submitter. Raises InvalidRequestError."""
        account = account_pb2.Account(name=name, role=role, namespace=namespace, unix_user=unix_user)
        request = account_pb2.CreateTokenRequest(account=account, lasts_s=lasts_s)
        made: account_pb2.CreateTokenReply = self._call(self._stub.CreateToken, request)
        return made

    def list(self, revoked: bool = False) -> Sequence[account_pb2.Token]:
        """Tokens that are good, the oldest first; with ``revoked`` the others, too."""
        found: Sequence[account_pb2.Token] = self._call(
            self._stub.ListTokens, account_pb2.ListTokensRequest(revoked=revoked)
        ).tokens
        return found

    def revoke(self, token: str) -> Sequence[account_pb2.Token]:
        """The token of that id, or all of that name, are good no more; calls with them end. Raises NotFoundError."""
        found: Sequence[account_pb2.Token] = self._call(
            self._stub.RevokeToken, account_pb2.RevokeTokenRequest(token=token)
        ).tokens
        return found

    def audit(
        self, limit: int = 100, who: str = "", target: str = "", refused: bool = False
    ) -> Sequence[account_pb2.AuditEntry]:
        """The ``limit`` newest entries of the audit log that fit, the newest first."""
        request = account_pb2.ListAuditRequest(who=who, target=target, refused=refused)
        found: list[account_pb2.AuditEntry] = []
        while len(found) < limit:
            request.limit = min(limit - len(found), PAGE)
            entries = self._call(self._stub.ListAudit, request).entries
            if not entries:
                break
            found += entries
            request.before_seq = entries[-1].seq
        return tuple(found)
