"""Opens PostgreSQL so that a transaction waits for few answers.

A question to a server costs a wait, and the processor time of falling asleep and waking up, while most statements of a
coordinator need no answer. So a transaction is a pipeline: after a statement with the option ``LATER`` the next one
follows at once. The first one without it waits for its own answer, the commit for all that are left; either raises what
went wrong with those before. BEGIN and COMMIT are sent in the same way.

With the option ``READ_ONLY`` there is no transaction: each statement is one question and one answer, and sees what was
committed when it began.

Nothing is left in a session when a transaction ends, prepared statements least of all: a pooler in transaction mode
(PgBouncer) gives the next one another session. The server then plans each statement for its values and for the tables
of that moment.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Mapping
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from bagua.daemon.coordinator.store.execution import LATER, READ_ONLY

_CONNECT_S = 10
_CONNECTIONS = 5


class PipelineDialect(PGDialect_psycopg):
    """Connections are in autocommit mode: neither SQLAlchemy nor psycopg begins a transaction. One that was given
    another isolation level behaves as usual."""

    supports_statement_cache = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        # The transactions that have begun, by the driver's connection.
        self._open: dict[psycopg.Connection[Any], tuple[contextlib.ExitStack, psycopg.Pipeline]] = {}

    def do_execute(self, cursor: Any, statement: Any, parameters: Any, context: Any = None) -> None:
        self._ask(cursor.connection, context, lambda: cursor.execute(statement, parameters))

    def do_execute_no_params(self, cursor: Any, statement: Any, context: Any = None) -> None:
        """Runs a statement without parameters."""
        self._ask(cursor.connection, context, lambda: cursor.execute(statement))

    def do_executemany(self, cursor: Any, statement: Any, parameters: Any, context: Any = None) -> None:
        """Runs one statement with several sets of parameters."""
        self._ask(cursor.connection, context, lambda: cursor.executemany(statement, parameters))

    def _ask(self, driver: psycopg.Connection[Any], context: Any, send: Callable[[], object]) -> None:
        options = _options(context)
        if not driver.autocommit or options.get(READ_ONLY):
            send()
            return
        if driver not in self._open:
            stack = contextlib.ExitStack()
            self._open[driver] = stack, stack.enter_context(driver.pipeline())
            driver.execute(b"BEGIN")
        send()
        if not options.get(LATER):
            self._open[driver][1].sync()

    def do_commit(self, dbapi_connection: Any) -> None:
        """Waits for the answers that are left."""
        driver = dbapi_connection.driver_connection
        if driver not in self._open:
            super().do_commit(dbapi_connection)  # type: ignore[no-untyped-call]
            return
        stack, _ = self._open.pop(driver)
        with stack:
            driver.execute(b"COMMIT")

    def do_rollback(self, dbapi_connection: Any) -> None:
        """Takes back all that was sent."""
        self._leave(dbapi_connection.driver_connection)
        super().do_rollback(dbapi_connection)  # type: ignore[no-untyped-call]

    def do_close(self, dbapi_connection: Any) -> None:
        """Closes the connection, also in the midst of a transaction if it was lost."""
        super().do_close(dbapi_connection)  # type: ignore[no-untyped-call]
        self._leave(dbapi_connection)

    def _leave(self, driver: psycopg.Connection[Any]) -> None:
        stack, _ = self._open.pop(driver, (None, None))
        if stack is not None:
            with contextlib.suppress(psycopg.Error):  # of a statement that is undone, or that the connection is lost
                stack.close()


def _options(context: Any) -> Mapping[str, Any]:
    """Returns the options of a statement; empty for those that SQLAlchemy runs for itself."""
    return {} if context is None else context.execution_options


_DRIVER = "psycopg_pipeline"
registry.register(f"postgresql.{_DRIVER}", __name__, PipelineDialect.__name__)


def open_server(url: sa.URL) -> sa.Engine:
    """An engine that has not connected yet."""
    if url.drivername in ("postgresql", "postgresql+psycopg") and psycopg.Pipeline.is_supported():
        url = url.set(drivername=f"postgresql+{_DRIVER}")
    elif url.drivername == "postgresql":  # SQLAlchemy before 2.1 would take psycopg2
        url = url.set(drivername="postgresql+psycopg")
    of_connection: dict[str, Any] = {"connect_timeout": _CONNECT_S}
    if url.get_driver_name() in (_DRIVER, "psycopg"):
        of_connection["prepare_threshold"] = None  # never
    if url.get_driver_name() != _DRIVER:
        return sa.create_engine(url, pool_pre_ping=True, pool_size=_CONNECTIONS, connect_args=of_connection)
    engine = sa.create_engine(
        url,
        isolation_level="AUTOCOMMIT",  # the dialect sends BEGIN itself, in the pipeline
        use_native_hstore=False,  # a question less
        pool_size=_CONNECTIONS,
        connect_args=of_connection,
    )

    @event.listens_for(engine, "checkout")
    def look(connection: Any, record: Any, proxy: Any) -> None:
        """A server that has gone away has said so: where nothing can be read, the connection is good, and need not be
        asked."""
        try:
            waiting = select.poll()
            waiting.register(connection.fileno(), select.POLLIN)
            if waiting.poll(0):
                engine.dialect.do_ping(connection)
        except psycopg.Error as error:
            raise sa.exc.DisconnectionError(str(error)) from error

    return engine
