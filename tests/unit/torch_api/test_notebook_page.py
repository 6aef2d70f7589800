"""docs/notebook.ipynb was executed to its end. tests/e2e/test_frameworks.py executes it anew, with --full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[3] / "docs" / "notebook.ipynb"


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_all_cells_were_executed_in_order() -> None:
    assert [cell["execution_count"] for cell in code_cells()] == list(range(1, len(code_cells()) + 1))


def test_outputs_show_no_error_and_a_whole_progress_bar() -> None:
    outputs = [output for cell in code_cells() for output in cell["outputs"]]
    assert all(output["output_type"] != "error" for output in outputs)
    bars = [output["data"]["text/html"] for output in outputs if output["output_type"] == "display_data"]
    assert len(bars) == 1 and "<progress" in "".join(bars[0])


def test_no_path_of_a_machine() -> None:
    assert not any(folder in NOTEBOOK.read_text() for folder in ("/root", "/home", "/tmp", "/usr"))
