"""Each error that a user can meet ends with a code, each code has its entry and is used, and the index lists all.

A text names its code itself, as "… [BG101]". An error without one either passes on the text of another error that has
one, or is no error of a user: ``INTERNAL`` and ``PASSED_ON`` say which, and why.
"""

import ast
import pickle
import re
from pathlib import Path

import grpc
from typer.testing import CliRunner

from bagua.base import errors
from bagua.base.errors import BaguaError, ConfigError
from bagua.base.rpc import error_of
from bagua.cli.app import app
from bagua.error_codes import areas, codes_in, entries

ROOT = Path(__file__).resolve().parents[3]
PAGES = ROOT / "docs" / "errors"
CODE = re.compile(r"\[(BG\d{3})\]")

OURS = {name for name in vars(errors) if name.endswith("Error") or name == "MembershipChanged"} | {
    *("UsageError", "LaunchError", "SpecificationError", "StoreError", "BadParameter", "DistBackendError")
}
"""Errors that users meet wherever they are made."""

OF_ARGUMENTS = {
    *("ValueError", "TypeError", "NotImplementedError", "RuntimeError", "KeyError", "ReferenceError"),
    *("AttributeError", "ModuleNotFoundError"),
}
PUBLIC = (
    "algorithms",
    "client/torch_api",
    "client/autoload",
    "client/c10d",
    "client/fsdp.py",
    "client/client",
    "client/lightning",
    "client/tuning",
)
"""In these folders errors of arguments are for users, too. Elsewhere they are caught, or are faults of ours."""

INTERNAL = {
    "client/examples/": "programs to read",
    "client/torch_api/comm/commit/ledger.py": "bytes between ranks of one version",
    "client/torch_api/comm/state_holders.py": "the coordinator ends such a job before",
    "client/torch_api/cache/seal.py: The entry is damaged": "caught: the sample is loaded anew",
    "client/torch_api/train/bucket_layout.py: Cuts must": "caught: a recorded cut that does not fit is not used",
    "client/tuning/partition.py": "caught: a setting that does not fit is not used",
    "daemon/coordinator/rounds/reconciler.py: request.job_id": "the servicer names the job",
}
"""Errors that no user meets, by file and first words."""

PASSED_ON = {
    "client/base/child_service.py: The {self.label} can't start": "the service's own words have the code",
    "client/cli/cluster/native.py": "the builder's own words have the code",
    "client/torch_api/job/lifeline.py: str(reply['error'])": "the cluster's own words have the code",
    "client/torch_api/job/service_process.py: str(message['error'])": "the service's own words have the code",
    "client/torch_api/job/connection.py": "the core's words have the code",
    "client/torch_api/cuda/connection.py: str(error)": "the words of the core and of the GPU leg have the code",
    "client/torch_api/cuda/connection.py: CUDA tensors can't be communicated: {error}": "so have these",
    "client/c10d/agreement.py: Group {self._name!r} of ranks {_text(self._ranks)} was not made": "words of that rank",
    "client/cli/main.py: words": "the text of any error: its code alone is read",
    "client/base/rpc.py": "the coordinator's words have the code",
    "client/torch_api/train/optimizer_state.py: document['error']": "rank 0's words have the code",
    "daemon/coordinator/api/nodes_servicer.py: words": "words of _Misfit and of protocol.py",
    "daemon/node/session/questions.py: the {what} of the job can't be fetched": "its callers name the code",
    "daemon/node/ranks/as_user.py: {answer['error']}": "the words of the process of that user",
    "csrc/build_cache.py: {failure.read_text()}": "the words of the build that failed",
}
"""Errors whose text is another one's, where the syntax does not show it."""


def sources(*suffixes):
    for folder in ("algorithms", "client", "csrc", "daemon", "deploy/kubernetes/operator"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (suffixes or (".py",)) and "_pb2" not in path.name:
                yield path


def name_of(function):
    return getattr(function, "attr", "") or getattr(function, "id", "") or ast.unparse(function).rpartition(".")[2]


def first_words(text):
    if isinstance(text, ast.Constant):
        return str(text.value)
    return ast.unparse(text).removeprefix("f").strip("'\"")


def caught_from(tree):
    """By node: the names that except clauses around it give to errors of ours, whose texts have codes."""
    found = {}
    for handler in ast.walk(tree):
        if isinstance(handler, ast.ExceptHandler) and handler.name and handler.type:
            kinds = {name_of(kind) for kind in getattr(handler.type, "elts", [handler.type])}
            if kinds & (OURS | OF_ARGUMENTS):
                for node in ast.walk(handler):
                    found.setdefault(node, set()).add(handler.name)
    return found


def passes_on(call, caught):
    """Whether the text holds that of an error which was caught."""
    return any(isinstance(node, ast.Name) and node.id in caught for node in ast.walk(call.args[0]))


def uncoded(content, path):
    """The errors for users in a file that have no code."""
    tree = ast.parse(content)
    caught = caught_from(tree)
    wanted = OURS | OF_ARGUMENTS if path.startswith(PUBLIC) else OURS
    excused = {**INTERNAL, **PASSED_ON}
    missing = []
    lines = content.splitlines()
    helpers = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and CODE.search("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not call.args or name_of(call.func) not in wanted:
            continue
        text = call.args[0]
        words = f"{path}: {first_words(text)}"
        if CODE.search(ast.unparse(call)) or passes_on(call, caught.get(call, set())):
            continue
        if isinstance(text, ast.Call) and name_of(text.func) in helpers:
            continue
        if "has no attribute" in words or any(words.startswith(excuse) for excuse in excused):
            continue
        missing.append(f"{path}:{call.lineno}: {ast.unparse(call)[:100]}")
    return missing


def test_each_error_of_a_user_has_a_code():
    missing = [line for path in sources() for line in uncoded(path.read_text(), str(path.relative_to(ROOT)))]
    assert missing == [], "end these texts with a code, as in '… [BG101]'; docs/errors lists the codes"


def refusals(content):
    """Lines of a file that end a call of gRPC with words, and whether these have a code, or are an error's."""
    tree = ast.parse(content)
    texts = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            texts[name] = texts.get(name, "") + ast.unparse(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) == "abort" and "StatusCode" in ast.unparse(node):
            words = ast.unparse(node.args[1])
            yield node.lineno, bool(CODE.search(texts.get(words, words))) or words == "str(error)"


def test_each_refusal_of_a_call_has_a_code():
    found = [(path, *one) for path in sources() if "abort(" in path.read_text() for one in refusals(path.read_text())]
    assert len(found) > 3 and [(path, line) for path, line, good in found if not good] == []


def test_each_code_is_used_and_has_an_entry():
    used = {code for path in sources(".py", ".cpp", ".h", ".cu") for code in CODE.findall(path.read_text())}
    known = {entry.code for area in areas() for entry in area.entries}
    assert used - known == set(), "codes without an entry in docs/errors"
    assert known - used == set(), "entries whose code no text has"
    assert len(entries()) == sum(len(area.entries) for area in areas()), "a code has two entries"
    for digit, area in enumerate(areas()):
        codes = [entry.code for entry in area.entries]
        assert all(code.startswith(f"BG{digit}") for code in codes) and codes == sorted(codes)
        assert codes == re.findall(r"^## (.+)$", (PAGES / f"{area.page}.md").read_text(), re.MULTILINE), (
            f"docs/errors/{area.page}.md: an entry is '## CODE', '**Title.** Cause.', 'Remedy: …', a paragraph each"
        )
        for entry in area.entries:
            assert entry.cause.endswith((".", "?")) and entry.remedy.endswith("."), entry.code


def test_the_index_lists_all_codes():
    rows = [
        (area.title, f"| [{entry.code}]({area.page}.md#{entry.code.lower()}) | {entry.title} |")
        for area in areas()
        for entry in area.entries
    ]
    found, heading = [], ""
    for line in (PAGES / "README.md").read_text().splitlines():
        heading = line.removeprefix("## ") if line.startswith("## ") else heading
        if line.startswith("| [BG"):
            found.append((heading, line))
    assert found == rows


def test_the_code_of_an_error():
    error = ConfigError("--x: there is no y [BG301]. Choose another one. [BG102]")
    assert error.code == "BG102" and codes_in(str(error)) == ["BG301", "BG102"]
    assert pickle.loads(pickle.dumps(error)).code == "BG102"
    assert error_of(grpc.StatusCode.NOT_FOUND, "There is no job 'x'. [BG810]").code == "BG810"
    assert BaguaError("words").code == ""


def test_explain():
    run = CliRunner()
    told = run.invoke(app, ["explain", "error: Rank 1 gave up after 3 s. [bg503]"])
    assert (
        told.exit_code == 0 and "BAGUA_WAIT_TIMEOUT_S" in told.output and "docs/errors/communication.md" in told.output
    )
    whole = run.invoke(app, ["explain", "BG501"]).output
    for short in ("501", "bg501", "[BG501]", "[501]", "BG-501", "BG 501", " 501."):
        assert run.invoke(app, ["explain", short]).output == whole
    assert {"BG501", "BG502"} <= set(codes_in(run.invoke(app, ["explain", "501", "bg502"]).output))
    assert run.invoke(app, ["explain", "exit code 501 of 4501"]).exit_code
    listed = run.invoke(app, ["explain"])
    assert all(entry.code in listed.output for entry in entries().values())
    assert '"code": "BG101"' in run.invoke(app, ["explain", "--output", "json", "BG101"]).output.replace("\n", "")
