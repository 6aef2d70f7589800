"""A column of a progress bar that gives way where the terminal is narrow: its text is cut, never wrapped."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.table import Column
from rich.text import Text


class CutColumn(ProgressColumn):
    """Shows the task's description, or the field of that name. The columns beside it keep their width (``no_wrap``)."""

    def __init__(self, name: str, style: str = "") -> None:
        super().__init__(table_column=Column())
        self._name = name
        self._style = style

    def render(self, task: Task) -> Text:
        text = task.description if self._name == "description" else task.fields[self._name]
        return Text(text, style=self._style, no_wrap=True, overflow="ellipsis")
