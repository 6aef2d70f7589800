"""Makes the Grafana dashboard: ``python3 deploy/grafana/dashboard.py`` writes ``bagua.json`` beside this file.

Needs Python alone. A test compares the file with this program, and its expressions with the metrics that exist.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, PER_ROW, HEIGHT = 24, 3, 8
SOURCE = {"type": "prometheus", "uid": "${source}"}
JOB = 'job_id=~"$job_id"'


@dataclass(frozen=True)
class Panel:
    """Panel with one graph. ``lines``: (expression, legend). ``unit``: as Grafana names it."""

    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = "short"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Cluster",
        (
            Panel(
                "Jobs by state", (('bagua_coordinator_jobs{state=~"pending|starting|running|waiting"}', "{{state}}"),)
            ),
            Panel(
                "Nodes",
                (("bagua_coordinator_nodes_connected", "connected"), ("bagua_coordinator_nodes_draining", "draining")),
            ),
            Panel("Slots", (("bagua_coordinator_slots", "all"), ("bagua_coordinator_slots_used", "used"))),
            Panel("Oldest job that waits for nodes", (("bagua_coordinator_oldest_pending_seconds", "age"),), "s"),
            Panel("Jobs that ended, per hour", (("increase(bagua_coordinator_jobs_ended_total[1h])", "{{state}}"),)),
            Panel(
                "Losses and changes of elastic jobs, per hour",
                (
                    (
                        'increase(bagua_coordinator_events_total{kind=~"regrouped|suspended|newcomers_lost"}[1h])',
                        "{{kind}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Coordinator",
        (
            Panel(
                "Mean time of a transaction",
                (
                    (
                        "rate(bagua_coordinator_transaction_seconds_total[5m])"
                        " / rate(bagua_coordinator_transactions_total[5m])",
                        "{{instance}}",
                    ),
                ),
                "s",
            ),
            Panel("Calls", (("sum by (method) (rate(bagua_coordinator_rpcs_total[5m]))", "{{method}}"),), "reqps"),
            Panel(
                "Refused calls, faults and errors",
                (
                    ("sum by (kind) (rate(bagua_coordinator_bad_calls_total[5m]))", "{{kind}}"),
                    ("sum(rate(bagua_coordinator_faults_total[5m]))", "faults"),
                    ("sum(rate(bagua_coordinator_reconcile_errors_total[5m]))", "errors of the database"),
                ),
            ),
        ),
    ),
    (
        "Jobs",
        (
            Panel("Steps a second", ((f"deriv(bagua_job_step{{{JOB}}}[2m])", "{{job_id}}"),)),
            Panel("Parts of a step", ((f"bagua_job_step_seconds{{{JOB}}}", "{{job_id}} {{part}}"),), "s"),
            Panel(
                "Ranks and newcomers",
                (
                    (f"bagua_job_ranks{{{JOB}}}", "{{job_id}} ranks"),
                    (f"bagua_job_newcomers{{{JOB}}}", "{{job_id}} newcomers"),
                ),
            ),
            Panel("Generation", ((f"bagua_job_generation{{{JOB}}}", "{{job_id}}"),)),
            Panel(
                "Nodes, and nodes wanted",
                (
                    (f"bagua_job_nodes{{{JOB}}}", "{{job_id}}"),
                    (f"bagua_job_nodes_wanted{{{JOB}}}", "{{job_id}} wanted"),
                ),
            ),
            Panel("Suspended", ((f"bagua_node_job_suspended{{{JOB}}}", "{{job_id}} {{instance}}"),)),
        ),
    ),
    (
        "Data plane",
        (
            Panel(
                "Bytes between hosts",
                (
                    (f"rate(bagua_engine_sent_bytes_total{{{JOB}}}[1m])", "{{job_id}} {{instance}} sent"),
                    (f"rate(bagua_engine_received_bytes_total{{{JOB}}}[1m])", "{{job_id}} {{instance}} received"),
                ),
                "Bps",
            ),
            Panel(
                "Share of time with communication",
                ((f"rate(bagua_engine_communication_seconds_total{{{JOB}}}[1m])", "{{job_id}} {{instance}}"),),
                "percentunit",
            ),
            Panel(
                "Frames dropped and refused",
                (
                    (f"rate(bagua_engine_dropped_frames_total{{{JOB}}}[5m])", "{{job_id}} {{instance}} dropped"),
                    (f"rate(bagua_engine_refused_frames_total{{{JOB}}}[5m])", "{{job_id}} {{instance}} refused"),
                ),
            ),
        ),
    ),
    (
        "Nodes",
        (
            Panel("Ranks", (("bagua_node_ranks", "{{instance}}"),)),
            Panel("Room for state", (("bagua_node_state_free_bytes", "{{instance}}"),), "bytes"),
            Panel("Memory of services", (('process_resident_memory_bytes{job=~"bagua-.*"}', "{{instance}}"),), "bytes"),
        ),
    ),
)


def expressions() -> list[str]:
    return [expression for _, panels in ROWS for panel in panels for expression, _ in panel.lines]


def dashboard() -> dict[str, Any]:
    """The document that Grafana imports."""
    made: list[dict[str, Any]] = []
    top = 0
    for title, panels in ROWS:
        made.append({"type": "row", "title": title, "id": len(made) + 1, "gridPos": _place(0, top, WIDTH, 1)})
        top += 1
        for number, panel in enumerate(panels):
            column, row = number % PER_ROW, number // PER_ROW
            width = WIDTH // PER_ROW
            place = _place(column * width, top + row * HEIGHT, width, HEIGHT)
            made.append({**_graph(panel), "id": len(made) + 1, "gridPos": place})
        top += -(-len(panels) // PER_ROW) * HEIGHT
    return {
        "title": "Bagua",
        "uid": "bagua",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "tags": ["bagua"],
        "templating": {"list": _variables()},
        "panels": made,
    }


def _variables() -> list[dict[str, Any]]:
    query = "label_values(bagua_job_info, job_id)"
    return [
        {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
        {
            "name": "job_id",
            "label": "Job",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": "jobs"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _graph(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for number, (expression, legend) in enumerate(panel.lines)
        ],
    }


def _place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


if __name__ == "__main__":
    Path(__file__).with_name("bagua.json").write_text(json.dumps(dashboard(), indent=1) + "\n")
