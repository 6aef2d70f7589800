"""Metrics, their page, alerts, runbooks and the dashboard agree with each other."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
import yaml
from rig.docs import pages
from rig.limits import SOON_S
from rig.system.prometheus import promtool

from bagua.base.errors import UnavailableError
from bagua.daemon.coordinator.host import metrics as coordinator_metrics
from bagua.daemon.coordinator.rules.domain import JobState
from bagua.daemon.metric_families import table
from bagua.daemon.node.host import metrics as node_metrics

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
FAMILIES = {family.name: family for family in (*coordinator_metrics.FAMILIES, *node_metrics.FAMILIES)}
OF_LIBRARIES = {"up", "process_open_fds", "process_max_fds", "process_resident_memory_bytes"}
OF_SCRAPES = {"job", "instance"}


def alerts():
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def graphs():
    panels = json.loads((ROOT / "deploy" / "grafana" / "bagua.json").read_text())["panels"]
    return [panel for panel in panels if panel["type"] == "timeseries"]


def shown():
    """Expressions of the dashboard."""
    return [target["expr"] for panel in graphs() for target in panel["targets"]]


def expressions():
    found = {alert["alert"]: alert["expr"] for alert in alerts()}
    return found | {f"dashboard {number}": text for number, text in enumerate(shown())}


@pytest.mark.parametrize("families", [coordinator_metrics.FAMILIES, node_metrics.FAMILIES], ids=["coordinator", "node"])
def test_the_page_lists_all_metrics(families):
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert table(families) in page, f"docs/metrics.md needs this table:\n{table(families)}"


def test_names_follow_the_conventions():
    for family in FAMILIES.values():
        assert re.fullmatch(r"bagua(_[a-z0-9]+)+", family.name), family
        assert family.help.endswith(".") and "|" not in family.help, family
        assert not OF_SCRAPES & set(family.labels), f"{family.name}: Prometheus itself sets such a label"


def test_a_database_that_does_not_answer_keeps_no_other_number_away(monkeypatch):
    """Else a coordinator without its database looks like one that is down."""
    monkeypatch.setattr(coordinator_metrics, "COUNT_S", 0.05)
    answers = threading.Event()

    def read():
        if not answers.wait(0.3):
            raise UnavailableError("The database does not answer.")
        return {JobState.PENDING: 7}

    counts = coordinator_metrics.JobCounts(read)
    assert counts.get() is None, "it does not wait for an answer"
    answers.set()
    give_up = time.monotonic() + SOON_S
    while counts.get() != {JobState.PENDING: 7}:
        assert time.monotonic() < give_up
    answers.clear()
    monkeypatch.setattr(coordinator_metrics, "COUNT_S", SOON_S)
    assert counts.get() is None, "the database has said no"


def test_expressions_use_metrics_and_labels_that_exist():
    for title, text in expressions().items():
        bare = re.sub(r'"[^"]*"', '""', text)
        names = set(re.findall(r"\b((?:bagua|process)_\w+|up)\b", bare))
        assert names and names <= FAMILIES.keys() | OF_LIBRARIES, (title, text)
        for name, matchers in re.findall(r"\b(\w+)\{([^}]*)\}", bare):
            allowed = OF_SCRAPES | set(FAMILIES[name].labels if name in FAMILIES else ())
            assert set(re.findall(r"(\w+)\s*[=!]", matchers)) <= allowed, (title, name)


def test_each_alert_has_a_runbook_and_a_test():
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    names = [alert["alert"] for alert in alerts()]
    assert sections == names
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    assert {test["name"] for test in tests} >= set(names)
    for alert in alerts():
        assert alert["annotations"]["runbook_url"].endswith(f"/docs/runbooks.md#{alert['alert'].lower()}")
        assert alert["labels"]["severity"] in ("critical", "warning", "info")


def test_promtool_takes_all_expressions(tmp_path):
    texts = [text.replace("$job_id", ".*") for text in expressions().values()]
    rules = [{"record": f"check:n{number}", "expr": text} for number, text in enumerate(texts)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "check", "rules": rules}]}))
    promtool("check", "rules", file)
    promtool("check", "config", PROMETHEUS / "prometheus.yml")


def test_each_alert_fires_and_none_does_without_need():
    for command in pages.run_by("test_each_alert_fires_and_none_does_without_need", "docs/observability.md"):
        assert "SUCCESS" in promtool(*command.split()[1:], cwd=ROOT)
