"""The site of docs/ builds without a warning and needs no network. Its reference has an entry for all that there is."""

from __future__ import annotations

import ast
import html
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from rig.docs.code_blocks import command_line

from bagua.daemon.coordinator.admin.settings import Settings as CoordinatorSettings
from bagua.daemon.coordinator.host import metrics as coordinator_metrics
from bagua.daemon.node.host import metrics as node_metrics
from bagua.operator.settings import Settings as OperatorSettings

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"client": "bagua", "algorithms": "bagua.algorithms", "csrc": "bagua.csrc"}
NO_VARIABLES = {
    "BAGUA_CUDA_KERNELS_H",  # guards of headers and macros
    "BAGUA_DTYPES",
    "BAGUA_EXPORT",
    "BAGUA_IN_CHILD",
    "BAGUA_C",
    "BAGUA_LOG_NORMS",  # the example of an option in CONTRIBUTING
    "BAGUA_PARENT",  # between a process and its child
}
"""Names in the sources that begin so."""


@dataclass(frozen=True)
class Site:
    """A site that was built."""

    folder: Path

    @cached_property
    def pages(self):
        """HTML by path."""
        return {path.relative_to(self.folder).as_posix(): path.read_text() for path in self.folder.rglob("*.html")}

    @cached_property
    def anchors(self):
        return {name: set(re.findall(r'\bid="?([^"\s>]+)', text)) for name, text in self.pages.items()}

    def entries(self, folder):
        """Anchors of all pages below ``folder``."""
        return {anchor for name, found in self.anchors.items() if name.startswith(folder) for anchor in found}

    def links(self):
        """(page, where a link leads)."""
        for name, text in self.pages.items():
            if name == "404.html":
                continue  # a server shows it anywhere, so its links begin at the root
            for quoted, bare in re.findall(r'\b(?:href|src)=(?:"([^"]*)"|([^\s>"]+))', text):
                yield name, html.unescape(quoted or bare)


pytestmark = [pytest.mark.full, pytest.mark.timeout(1000)]  # the build takes 15 s of a core, which may be busy


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built as ``dev.py docs`` does it: a warning is an error."""
    pytest.importorskip("mkdocs", reason="MkDocs is not installed")
    folder = tmp_path_factory.mktemp("site") / "site"
    words = [sys.executable, str(ROOT / "deploy" / "site" / "build.py"), "--out", str(folder)]
    done = subprocess.run(words, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return Site(folder)


def test_links_lead_somewhere(site):
    """To a file of the site and an anchor in it, or to an address that is well formed."""
    broken = []
    for page, link in site.links():
        parts = urlsplit(link)
        if parts.scheme in ("http", "https"):
            good = bool(re.fullmatch(r"[\w.-]+(:\d+)?", parts.netloc)) and " " not in link
        elif parts.scheme:
            good = parts.scheme in ("data", "mailto")
        else:
            path = (site.folder / page).parent / unquote(parts.path) if parts.path else site.folder / page
            name = path.resolve().relative_to(site.folder.resolve()).as_posix()
            name = "index.html" if name == "." else name
            anchor = unquote(parts.fragment)
            good = path.exists() and (not anchor or name not in site.anchors or anchor in site.anchors[name])
        if not good:
            broken.append(f"{page}: {link}")
    assert broken == []


def public_names():
    """(module, name) of each ``__all__``, but names with an underscore and modules."""
    for folder, package in PACKAGES.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            module = ".".join([package, *parts]).removesuffix(".__init__").replace("bagua.bagua_core", "bagua_core")
            for node in ast.parse(path.read_text()).body if "__all__ =" in path.read_text() else ():
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    for name in ast.literal_eval(node.value):
                        folder_of_modules = (
                            ROOT / "algorithms" if module == "bagua.torch_api.algorithms" else path.parent
                        )
                        inner = folder_of_modules / name if path.name == "__init__.py" else path / name
                        if not name.startswith("_") and not inner.is_dir() and not inner.with_suffix(".py").exists():
                            yield module, name


def test_each_public_name_has_an_entry(site):
    names = {f"{module}.{name}" for module, name in public_names()}
    assert len(names) > 300 and "bagua.torch_api.init_process_group" in names
    assert names - site.entries("reference/python/") == set()
    assert "Optimizer steps between two reports" in site.pages["reference/python/bagua.lightning.html"]


def test_each_command_and_option_has_an_entry(site):
    expected = set()
    for name, command in command_line().items():
        place = name.replace(" ", "-")
        expected.add(place)
        for parameter in command.params:
            if not getattr(parameter, "hidden", False) and parameter.param_type_name == "option":
                expected |= {f"{place}{option}" for option in (*parameter.opts, *parameter.secondary_opts)}
    assert len(expected) > 300
    assert expected - site.entries("reference/command-line/") - {"bagua"} == set()


def variables():
    """Environment variables that programs read, or pages name."""
    found = set()
    for folder in ("client", "daemon", "algorithms", "csrc", "deploy"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h") and not path.is_relative_to(ROOT / "deploy" / "site"):
                found |= set(re.findall(r"[\"'](BAGUA_[A-Z0-9_]*[A-Z0-9])(?:=[^\"']*)?[\"']", path.read_text()))
    now = [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"]  # that one names what is gone, too
    for path in [*(ROOT / "docs").rglob("*.md"), *now, *ROOT.glob("*/README.md")]:
        found |= set(re.findall(r"\bBAGUA_[A-Z0-9_]*[A-Z0-9]\b(?!_)", path.read_text()))
    return found - NO_VARIABLES


def test_each_variable_has_an_entry(site):
    found = variables()
    assert {"BAGUA_ALGORITHM", "BAGUA_TOKEN_FILE", "BAGUA_NET_STATS", "BAGUA_STATE_DIR"} <= found
    entries = site.anchors["reference/variables.html"]
    assert found - entries == set()
    named = {name for name in entries if name.startswith("BAGUA_")}
    sources = "".join(path.read_text() for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))
    settings = {name for name in named if name.startswith(("BAGUA_COORDINATOR_", "BAGUA_OPERATOR_", "BAGUA_NET_"))}
    tests = {name for name in named if name.startswith(("BAGUA_TEST_", "BAGUA_SIMULATION_"))}
    assert {name for name in named - found - settings - tests if name not in sources} == set()


def test_each_setting_has_an_entry(site):
    entries = site.anchors["reference/settings.html"]
    for kind in (CoordinatorSettings, OperatorSettings):
        prefix = kind.model_config["env_prefix"].lower()
        assert {prefix + name for name in kind.model_fields} - entries == set()


def test_each_metric_has_an_entry(site):
    for family in (*coordinator_metrics.FAMILIES, *node_metrics.FAMILIES):
        assert f"<code>{family.name}</code>" in site.pages["metrics.html"], family.name
