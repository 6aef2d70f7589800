"""PgBouncer in transaction mode: each transaction gets whichever session with the server is free."""

import subprocess
from contextlib import contextmanager

import sqlalchemy as sa

from rig.ports import free_port
from rig.system.postgres import as_postgres


@contextmanager
def pgbouncer(url, folder, sessions=4):
    """The URL of the database behind ``url`` through a pooler that has so many sessions with it. The folder is one that
    the user postgres can enter."""
    server = sa.make_url(url)
    port = free_port()
    settings = folder / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n* = host={server.host} port={server.port} user={server.username}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"pool_mode = transaction\ndefault_pool_size = {sessions}\nserver_round_robin = 1\n"
    )
    command = [*(as_postgres() or []), "pgbouncer", str(settings)]
    with subprocess.Popen(command, cwd="/", stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any("process up" in line for line in process.stderr), "pgbouncer did not start"
            yield server.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
        finally:
            process.terminate()
            process.stderr.read()
