from __future__ import annotations

import os
import shlex

from bagua.cli.command import command
from bagua.cli.net.plugin import built_plugin
from bagua.cli.options import Output


@command()
def env(output: Output) -> None:
    """Prints what a shell must export so that NCCL takes the plugin:

    eval "$(bagua net env)"

    and then start any program that uses NCCL, from 2.20 to 2.30. On every host.
    A program whose NCCL can't use the plugin fails, with words in NCCL's log.
    """
    from bagua.base.net_plugin import variables

    found = variables(built_plugin(), os.environ)
    # With the semicolon it may also go through $(…) without quotes.
    output.show(found, "\n".join(f"export {name}={shlex.quote(value)};" for name, value in found.items()))
