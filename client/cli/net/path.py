from __future__ import annotations

from bagua.cli.command import command
from bagua.cli.net.plugin import built_plugin
from bagua.cli.options import Output


@command()
def path(output: Output) -> None:
    """Prints where the plugin lies, libnccl-net-bagua.so. It is built at the
    first time."""
    found = str(built_plugin())
    output.show({"path": found}, found)
