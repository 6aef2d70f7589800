"""Variables that lead NCCL to the plugin, and the settings that ask for it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from bagua import csrc
from bagua.base import net_plugin
from bagua.base.errors import BuildError, ConfigError, ServiceError
from bagua.base.job_options import variables
from bagua.cli.net import plugin as net

LIBRARY = Path("/cache/nccl_net/key/libnccl-net-bagua.so")


def test_variables_lead_nccl_to_the_plugin() -> None:
    found = net_plugin.variables(LIBRARY, {})
    assert found == {
        "NCCL_NET_PLUGIN": "bagua",
        "NCCL_NET": "Bagua-Net",
        "NCCL_NET_PLUGIN_REF_COUNT": "1",
        "LD_LIBRARY_PATH": "/cache/nccl_net/key",
    }
    assert LIBRARY.name == f"libnccl-net-{found['NCCL_NET_PLUGIN']}.so"


def test_search_path_keeps_what_is_there() -> None:
    before = {"LD_LIBRARY_PATH": "/usr/lib::/opt/lib"}
    first = net_plugin.variables(LIBRARY, before)
    assert first["LD_LIBRARY_PATH"] == "/cache/nccl_net/key:/usr/lib:/opt/lib"
    assert net_plugin.variables(LIBRARY, first) == first


def test_a_folder_that_no_search_path_can_hold() -> None:
    with pytest.raises(ConfigError, match="BAGUA_CACHE_DIR"):
        net_plugin.variables(Path("/a:b/libnccl-net-bagua.so"), {})


@pytest.mark.parametrize(("value", "meant"), (("1", True), ("true", True), ("0", False), ("False", False), ("", False)))
def test_who_asks_for_it(value: str, meant: bool) -> None:
    assert net_plugin.wanted({net_plugin.VARIABLE: value}) is meant
    assert not net_plugin.wanted({})


def test_neither_yes_nor_no() -> None:
    with pytest.raises(ConfigError, match="BAGUA_ENABLE_NET='maybe'"):
        net_plugin.wanted({net_plugin.VARIABLE: "maybe"})


def test_the_option_becomes_a_variable() -> None:
    assert variables({"env": {"A": "1"}, "enable_bagua_net": True}) == {"A": "1", "BAGUA_ENABLE_NET": "1"}
    assert variables({"enable_bagua_net": False}) == {}
    for name in ("NCCL_NET", "NCCL_NET_PLUGIN"):
        with pytest.raises(ConfigError, match=f"--enable-bagua-net sets {name} itself: leave --env {name}=Socket"):
            variables({"env": {name: "Socket"}, "enable_bagua_net": True})


def test_layout_of_the_properties() -> None:
    assert ctypes.sizeof(net.Properties) == 64


def test_a_file_that_is_no_plugin(tmp_path: Path) -> None:
    broken = tmp_path / "libnccl-net-bagua.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(ServiceError, match="can't be loaded"):
        net.devices(broken)


def test_a_build_that_fails_is_told_in_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BAGUA_CACHE_DIR", str(tmp_path))

    def fail() -> Path:
        raise csrc.BuildError("no compiler: install g++")

    monkeypatch.setattr(csrc, "net_plugin", fail)
    with pytest.raises(BuildError, match="install g"):
        net.built_plugin()
