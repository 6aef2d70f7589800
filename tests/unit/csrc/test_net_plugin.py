"""Variables that lead NCCL to the plugin, and the settings that ask for it."""

from pathlib import Path

import pytest

from bagua.base import net_plugin
from bagua.base.errors import ConfigError, ServiceError
from bagua.base.job_options import variables
from bagua.cli.net import plugin as net

LIBRARY = Path("/cache/nccl_net/key/libnccl-net-bagua.so")


def test_variables_lead_nccl_to_the_plugin():
    found = net_plugin.variables(LIBRARY, {})
    assert found == {
        "NCCL_NET_PLUGIN": "bagua",
        "NCCL_NET": "Bagua-Net",
        "NCCL_NET_PLUGIN_REF_COUNT": "1",
        "LD_LIBRARY_PATH": "/cache/nccl_net/key",
    }
    assert LIBRARY.name == f"libnccl-net-{found['NCCL_NET_PLUGIN']}.so"


def test_search_path_keeps_what_is_there():
    before = {"LD_LIBRARY_PATH": "/usr/lib::/opt/lib"}
    first = net_plugin.variables(LIBRARY, before)
    assert first["LD_LIBRARY_PATH"] == "/cache/nccl_net/key:/usr/lib:/opt/lib"
    assert net_plugin.variables(LIBRARY, first) == first


def test_the_option_becomes_a_variable():
    assert variables({"env": {"A": "1"}, "enable_bagua_net": True}) == {"A": "1", "BAGUA_ENABLE_NET": "1"}
    assert variables({"enable_bagua_net": False}) == {}
    for name in ("NCCL_NET", "NCCL_NET_PLUGIN"):
        with pytest.raises(ConfigError, match=f"--enable-bagua-net sets {name} itself: leave --env {name}=Socket"):
            variables({"env": {name: "Socket"}, "enable_bagua_net": True})


def test_a_file_that_is_no_plugin(tmp_path):
    broken = tmp_path / "libnccl-net-bagua.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(ServiceError, match="can't be loaded"):
        net.devices(broken)
