"""Draws the diagrams of docs/concepts as SVG: `python docs/diagrams.py` writes all of them again.

They need no network and no program to be seen. Each has a background of its own, in the reader's light or dark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "concepts"
STYLE = """
    .ground { fill: #ffffff } .text { fill: #1b2533 } .small { fill: #4a5a70; font-size: 12px }
    .box { fill: #eef3fb; stroke: #33507a } .frame { fill: none; stroke: #8496ae; stroke-dasharray: 5 4 }
    .strong { fill: #fdf1dc; stroke: #a86a12 } .gone { fill: #fbe6e4; stroke: #b0362b }
    .line { stroke: #4a5a70; fill: none; stroke-width: 1.6 } .head { fill: #4a5a70 }
    @media (prefers-color-scheme: dark) {
      .ground { fill: #161b22 } .text { fill: #e6edf3 } .small { fill: #a8b3c1 }
      .box { fill: #1f2d44; stroke: #7fa3d9 } .frame { stroke: #6a7788 }
      .strong { fill: #40311a; stroke: #e0a64a } .gone { fill: #47211e; stroke: #e5746a }
      .line { stroke: #a8b3c1 } .head { fill: #a8b3c1 }
    }
"""
LINE_PX = 17


class Picture:
    """Shapes of one diagram, in pixels from its upper left corner."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.title, self.width, self.height = title, width, height
        self.shapes: list[str] = []

    def text(self, x: int, y: int, words: str, *, small: bool = False, anchor: str = "middle") -> None:
        """Draws one line of text; ``y`` is its base line."""
        kind = "text small" if small else "text"
        self.shapes.append(f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: int, y: int, width: int, height: int, lines: Sequence[str], kind: str = "box") -> None:
        """A rectangle; the first line of its text is a title, the others are small. Those of a "frame" are on top."""
        rectangle = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="6"'
        self.shapes.append(f'<rect class="{kind}" {rectangle}/>')
        first = y + 18 if kind == "frame" else y + height // 2 - (len(lines) - 1) * LINE_PX // 2 + 5
        for number, line in enumerate(lines):
            self.text(x + width // 2, first + number * LINE_PX, line, small=number > 0 or kind == "frame")

    def arrow(self, *points: tuple[int, int], both: bool = False) -> None:
        """A line through the points, with a head at its end, or at both ends."""
        path = " ".join(f"{x},{y}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        self.shapes.append(f'<polyline class="line" points="{path}"{start} marker-end="url(#head)"/>')

    def svg(self) -> str:
        """Returns the whole document."""
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        marker = 'id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
        head = f'<marker {marker} orient="auto-start-reverse"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker>'
        body = "\n  ".join(self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="system-ui, sans-serif" '
            f'font-size="14">\n  <title>{escape(self.title)}</title>\n  <style>{STYLE}  </style>\n  '
            f'<defs>{head}</defs>\n  <rect class="ground" width="100%" height="100%" rx="8"/>\n  {body}\n</svg>\n'
        )


def processes() -> Picture:
    picture = Picture("The processes of a cluster and the ways between them", 760, 420)
    picture.box(20, 20, 150, 56, ["bagua", "command line"])
    picture.box(300, 20, 170, 56, ["coordinator", "decides who runs where"], "strong")
    picture.box(600, 20, 140, 56, ["database", "SQLite, PostgreSQL"])
    picture.arrow((170, 48), (300, 48))
    picture.text(235, 40, "gRPC", small=True)
    picture.arrow((470, 48), (600, 48), both=True)
    for x, name, keeper, daemon in ((20, "host a", 40, 170), (400, "host b", 630, 420)):
        picture.box(x, 150, 340, 250, [name], "frame")
        picture.box(keeper, 180, 90, 60, ["keeper", "parent of all"])
        picture.box(daemon, 180, 170, 60, ["node daemon", "engine: reduces, sends"], "strong")
        picture.arrow((130, 210), (170, 210)) if keeper < daemon else picture.arrow((630, 210), (590, 210))
        for left, rank in ((x + 40, x // 200), (x + 200, x // 200 + 1)):
            picture.box(left, 320, 100, 60, [f"rank {rank}", "your script"])
            picture.arrow((left + 50, 320), (left + 50, 284), both=True)
        picture.box(x + 20, 260, 300, 24, ["shared memory: buckets"])
        picture.arrow((daemon + 85, 260), (daemon + 85, 240), both=True)
        picture.arrow((385, 76), (385, 120), (daemon + 85, 120), (daemon + 85, 180), both=True)
    picture.text(398, 100, "facts up, decisions down (gRPC)", small=True, anchor="start")
    picture.arrow((340, 210), (420, 210), both=True)
    picture.text(380, 202, "gradients", small=True)
    return picture


def gradient() -> Picture:
    picture = Picture("The way of one gradient, from autograd's hook and back to .grad", 820, 330)
    picture.box(15, 40, 380, 270, ["rank: the thread that calls backward()"], "frame")
    picture.box(425, 40, 380, 270, ["node daemon: threads of the engine"], "frame")
    steps = [
        (30, 75, ["1 hook", "a gradient is there"]),
        (215, 75, ["2 bucket", "counts down; full: start"]),
        (215, 155, ["3 shared memory", "operation into the ring"]),
        (30, 155, ["8 end of backward()", "waits once"]),
        (30, 235, [".grad", "shows the result"]),
        (440, 155, ["4 all ranks of the host", "have submitted it"]),
        (625, 155, ["5 reduce", "one pass over all inputs"]),
        (625, 235, ["6 exchange", "encode, wire, decode"]),
        (440, 235, ["7 write the result", "wake the ranks"]),
    ]
    for x, y, lines in steps:
        picture.box(x, y, 165, 54, lines, "strong" if lines[0][0] in "567" else "box")
    picture.arrow((195, 102), (215, 102))
    picture.arrow((297, 129), (297, 155))
    picture.arrow((380, 182), (440, 182))
    picture.arrow((605, 182), (625, 182))
    picture.arrow((707, 209), (707, 235))
    picture.arrow((625, 262), (605, 262))
    picture.arrow((440, 270), (205, 270), (205, 190), (195, 190))
    picture.arrow((112, 209), (112, 235))
    picture.arrow((112, 129), (112, 155))
    picture.text(120, 146, "next layers", small=True, anchor="start")
    picture.text(318, 262, "done", small=True)
    picture.text(410, 24, "computation goes on while 4 to 7 happen")
    return picture


def job() -> Picture:
    picture = Picture("A job, from submit to its end", 820, 250)
    states = [
        (15, "PENDING", "stored; waits for slots"),
        (180, "STARTING", "core, engine, ranks"),
        (345, "RUNNING", "all ranks were started"),
        (510, "STOPPING", "ranks are ended"),
    ]
    for x, name, words in states:
        picture.box(x, 60, 150, 60, [name, words], "strong" if name == "RUNNING" else "box")
    for x in (165, 330, 495):
        picture.arrow((x, 90), (x + 15, 90))
    picture.box(675, 20, 130, 40, ["SUCCEEDED"])
    picture.box(675, 70, 130, 40, ["FAILED"], "gone")
    picture.box(675, 120, 130, 40, ["CANCELLED"])
    for y in (40, 90, 140):
        picture.arrow((660, 90), (675, y))
    picture.box(345, 165, 150, 60, ["WAITING", "elastic: paused, too few"])
    picture.arrow((400, 120), (400, 165), both=True)
    picture.text(20, 30, "Each change is one transaction, with its reason.", anchor="start", small=True)
    picture.text(20, 150, "PENDING can also end as FAILED or CANCELLED at once,", anchor="start", small=True)
    picture.text(20, 167, "STARTING, WAITING also go to STOPPING.", anchor="start", small=True)
    return picture


def generation() -> Picture:
    picture = Picture("Generations of an elastic job: a loss, and a join", 820, 330)
    picture.text(130, 30, "generation 1")
    picture.text(400, 30, "generation 2")
    picture.text(680, 30, "generation 3")
    columns = [
        (40, ["member 0, rank 0", "member 1, rank 1", "member 2, rank 2"]),
        (310, ["member 0, rank 0", "member 2, rank 1", ""]),
        (590, ["member 0, rank 0", "member 2, rank 1", "member 3, rank 2"]),
    ]
    for x, members in columns:
        picture.box(x, 45, 190, 150, [""], "frame")
        for number, member in enumerate(members):
            if member:
                lost, new = member.startswith("member 1"), member.startswith("member 3")
                kind = "gone" if lost else "strong" if new else "box"
                picture.box(x + 15, 60 + 42 * number, 160, 34, [member], kind)
    picture.arrow((230, 100), (310, 100))
    picture.arrow((500, 100), (590, 100))
    picture.text(270, 92, "a loss", small=True)
    picture.text(545, 92, "a plan", small=True)
    picture.box(
        40,
        215,
        350,
        95,
        ["loss: at once", "a step under way: all commit it, or all", "repeat it from the gradients they hold"],
    )
    picture.box(
        430,
        215,
        350,
        95,
        ["join or leave: between two steps", "agreed in the flags of a step;", "newcomers take over the state"],
    )
    return picture


def plan() -> Picture:
    picture = Picture("The plan of a bucket: steps over its slots, compiled into phases", 820, 260)
    picture.text(20, 30, "the plan of power_sgd", anchor="start")
    steps = [
        (20, ["Local", "P from gradients"], "box"),
        (180, ["AllReduce", "P in slot left"], "strong"),
        (340, ["Local", "Q from P"], "box"),
        (500, ["AllReduce", "Q in slot right"], "strong"),
        (660, ["Local", "P Q transposed"], "box"),
    ]
    for x, lines, kind in steps:
        picture.box(x, 60, 140, 60, lines, kind)
        if x < 660:
            picture.arrow((x + 140, 90), (x + 160, 90))
    for x, width, name in ((12, 316, "phase 1"), (332, 316, "phase 2"), (652, 156, "phase 3")):
        picture.box(x, 45, width, 110, [""], "frame")
        picture.text(x + width // 2, 146, name, small=True)
    picture.text(20, 188, "slots of the bucket", anchor="start")
    for number, slot in enumerate(["fresh (gradients)", "left", "right", "result (.grad)"]):
        picture.box(20 + 160 * number, 200, 140, 36, [slot])
    return picture


PICTURES: tuple[Callable[[], Picture], ...] = (processes, gradient, job, generation, plan)

if __name__ == "__main__":
    for drawing in PICTURES:
        (FOLDER / f"{drawing.__name__}.svg").write_text(drawing().svg())
