"""Bagua-Net, the network plugin of NCCL: what a program's environment needs so that NCCL finds and takes it.

NCCL up to 2.20 looks for ``libnccl-net-SUFFIX.so`` in the linker's search path and nowhere else; later versions take a
path, too, but none longer than 255 characters. A suffix and a search path work with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bagua.base.errors import ConfigError

VARIABLE = "BAGUA_ENABLE_NET"  # 1 in a job's environment, or in a node daemon's: ranks get the plugin

SUFFIX = "bagua"
# Name of the network, in NCCL's table and log. Without NCCL_NET NCCL would pass over a plugin that can't start, in
# silence, and ranks would use different transports.
NAME = "Bagua-Net"

_WORDS = {"1": True, "true": True, "0": False, "false": False, "": False}


def wanted(env: Mapping[str, str]) -> bool:
    """True if this environment asks for the plugin. Raises ConfigError for what is neither yes nor no."""
    value = env.get(VARIABLE, "")
    if value.lower() not in _WORDS:
        raise ConfigError(f"{VARIABLE}={value!r}: write 1 or 0. [BG106]")
    return _WORDS[value.lower()]


def variables(library: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Variables for a program whose environment is ``env``. Raises ConfigError for a folder that can't stand in
    a search path.

    The plugin stays loaded when the last communicator goes: NCCL 2.28 would forget the plugin's name
    (NVIDIA/nccl#1978), and refuse the process's next communicator.
    """
    folder = str(library.parent)
    if ":" in folder or ";" in folder:
        raise ConfigError(
            f"The plugin lies in {folder}: a folder with : or ; can't stand in LD_LIBRARY_PATH. Choose another with "
            "BAGUA_CACHE_DIR. [BG211]"
        )
    # Once, however often it is called.
    before = [part for part in env.get("LD_LIBRARY_PATH", "").split(":") if part and part != folder]
    return {
        "NCCL_NET_PLUGIN": SUFFIX,
        "NCCL_NET": NAME,
        "NCCL_NET_PLUGIN_REF_COUNT": "1",  # see above: NCCL 2.28 must not unload it
        "LD_LIBRARY_PATH": ":".join([folder, *before]),
    }
