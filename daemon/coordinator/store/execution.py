"""Execution options of statements: how a database is asked."""

READ_ONLY = "bagua_read_only"  # of a connection: SQLite takes no write lock, PostgreSQL begins no transaction
LATER = "bagua_later"  # of a statement: nobody needs its answer. PostgreSQL is asked the next thing at once
