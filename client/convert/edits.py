"""Changes of a source text at places of its syntax tree; all that is not changed stays as it is, to the byte."""

from __future__ import annotations

import ast
import io
import platform
import tokenize
from dataclasses import dataclass, field

from bagua.base.errors import UsageError

_BOM = b"\xef\xbb\xbf"


@dataclass
class Source:
    """A file's text, and the tree of it. Offsets count bytes of UTF-8, as those of trees do."""

    name: str
    data: bytes
    _edits: list[tuple[int, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.name.endswith(".ipynb"):
            raise UsageError(
                f'{self.name} is a notebook, and convert reads scripts. In its training function write "bagua" for the '
                "backend, and launch it by bagua.notebook_launcher (docs/frameworks.md#notebooks). [BG102]"
            )
        try:
            self.encoding, _ = tokenize.detect_encoding(io.BytesIO(self.data).readline)
            self._text = self.data.removeprefix(_BOM).decode(self.encoding.removesuffix("-sig")).encode()
            self.tree = ast.parse(self._text.decode(), self.name)
        except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError, MemoryError) as error:
            where = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
            raise UsageError(
                f"{self.name} is no Python that this version (Python {platform.python_version()}) can read{where}: "
                f"{error}. [BG102]"
            ) from error
        self.line_ends = "\r\n" if b"\r\n" in self._text else "\n"
        self._lines = [0]
        for line in self._text.splitlines(keepends=True):  # of bytes: a text has more kinds of line ends than Python
            self._lines.append(self._lines[-1] + len(line))

    def begin(self, node: ast.stmt | ast.expr | ast.keyword | ast.alias) -> int:
        """The offset of its first byte."""
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.stmt | ast.expr | ast.keyword | ast.alias) -> int:
        """The offset behind its last byte."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def line_begin(self, offset: int) -> int:
        """The offset of the line."""
        return max(begin for begin in self._lines if begin <= offset)

    def text(self, begin: int, end: int) -> str:
        return self._text[begin:end].decode()

    def indentation(self, node: ast.stmt) -> str | None:
        """The blanks before a statement that begins its line; None if something else stands there."""
        before = self.text(self.line_begin(self.begin(node)), self.begin(node))
        return None if before.strip() else before

    def alone(self, node: ast.stmt) -> bool:
        """True if no other statement is on its lines."""
        rest = self._text[self.end(node) :].partition(b"\n")[0].strip()
        return self.indentation(node) is not None and (not rest or rest.startswith(b"#"))

    def line_end(self, node: ast.stmt) -> int:
        """The offset of the end of its last line, before the line's end itself."""
        behind = self._text[self.end(node) :].partition(b"\n")[0]
        return self.end(node) + len(behind.removesuffix(b"\r"))

    def replace(self, begin: int, end: int, text: str) -> None:
        """Notes a change. Changes do not overlap."""
        self._edits.append((begin, end, text.replace("\n", self.line_ends)))

    @property
    def changes(self) -> int:
        return len(self._edits)

    def result(self) -> bytes:
        """The changed text, in the encoding of the file. It is Python again."""
        changed, at = b"", 0
        for begin, end, text in sorted(self._edits, key=lambda edit: edit[:2]):
            assert at <= begin, "changes overlap"
            changed += self._text[at:begin] + text.encode()
            at = end
        changed += self._text[at:]
        ast.parse(changed.decode(), self.name)  # a mistake of ours must not reach the file
        bom = _BOM if self.data.startswith(_BOM) else b""
        return bom + changed.decode().encode(self.encoding.removesuffix("-sig"))
