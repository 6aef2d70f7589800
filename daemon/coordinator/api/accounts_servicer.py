"""Implements AccountService. It only translates."""

from __future__ import annotations

from typing import Any, TypeAlias

import grpc

from bagua.daemon.coordinator.rules.identity import CURRENT
from bagua.daemon.coordinator.rules.translate import checked_number
from bagua.daemon.coordinator.use.accounts import Accounts, Token
from bagua.daemon.coordinator.use.audit import Audit
from bagua.proto import account_pb2, account_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_DEFAULT_PAGE = 100
_MAX_PAGE = 1_000


class AccountServicer(account_pb2_grpc.AccountServiceServicer):
    """Errors of the service are turned into status codes by ``CallInterceptor``."""

    def __init__(self, accounts: Accounts, audit: Audit) -> None:
        self._accounts = accounts
        self._audit = audit

    async def WhoAmI(self, request: account_pb2.WhoAmIRequest, context: Context) -> account_pb2.Account:
        who = CURRENT.get()
        return account_pb2.Account(name=who.name, role=who.role, namespace=who.namespace, unix_user=who.unix_user)

    async def CreateToken(
        self, request: account_pb2.CreateTokenRequest, context: Context
    ) -> account_pb2.CreateTokenReply:
        """The only time that its secret is told."""
        asked = request.account
        token, secret = await self._accounts.create(
            asked.name, asked.role, asked.namespace, request.lasts_s, CURRENT.get().name, asked.unix_user
        )
        return account_pb2.CreateTokenReply(token=_message(token), secret=secret)

    async def ListTokens(self, request: account_pb2.ListTokensRequest, context: Context) -> account_pb2.ListTokensReply:
        """Lists tokens, the oldest first."""
        return account_pb2.ListTokensReply(
            tokens=[_message(one) for one in await self._accounts.tokens(request.revoked)]
        )

    async def RevokeToken(
        self, request: account_pb2.RevokeTokenRequest, context: Context
    ) -> account_pb2.RevokeTokenReply:
        """Revokes a token. Calls that use it end."""
        return account_pb2.RevokeTokenReply(
            tokens=[_message(one) for one in await self._accounts.revoke(request.token)]
        )

    async def ListAudit(self, request: account_pb2.ListAuditRequest, context: Context) -> account_pb2.ListAuditReply:
        """Lists entries of the audit log, the newest first."""
        limit = min(request.limit or _DEFAULT_PAGE, _MAX_PAGE)
        before = checked_number("before_seq", request.before_seq)
        rows = await self._audit.entries(limit, before, request.who, request.target, request.refused)
        return account_pb2.ListAuditReply(entries=[account_pb2.AuditEntry(**row._mapping) for row in rows])


def _message(token: Token) -> account_pb2.Token:
    account = account_pb2.Account(
        name=token.name, role=token.role, namespace=token.namespace, unix_user=token.unix_user
    )
    return account_pb2.Token(
        id=token.token_id,
        account=account,
        created_at=token.created_at,
        created_by=token.created_by,
        expires_at=token.expires_at,
        revoked_at=token.revoked_at,
    )
