"""The rules of the house that a machine can check, over the files as they lie here."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from pathlib import Path

import jaxtyping
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from logra_ref.predicted_kl import exact_kl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def files() -> Iterator[Path]:
    """What belongs to the project: all but what .gitignore names and other tools' dot folders."""
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()]
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            name
            for name in subfolders
            if not any(fnmatch(name, pattern) for pattern in ignored) and (name == ".ci" or not name.startswith("."))
        ]
        yield from (Path(folder, name) for name in names if not any(fnmatch(name, pattern) for pattern in ignored))


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(node: ast.AST) -> str:
    """`torch.distributed` of the expression with that text; "" for anything but names and dots."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def lines_of_code(path: Path) -> int:
    """Lines that hold more than a comment or a docstring."""
    with path.open("rb") as file:
        blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
        tokens = [t for t in tokenize.tokenize(file.readline) if t.type not in {*blank, tokenize.ENDMARKER}]
    lines = {line for t in tokens for line in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_lines_of_code_are_counted_without_docstrings_and_comments_only(tmp_path):
    path = tmp_path / "a.py"
    path.write_text('"""Doc\n\nstring."""\n\n# why\nx = """two\nlines"""  # and why\n\ndef f():\n    """Doc."""\n')
    assert lines_of_code(path) == 3


def test_the_reference_stays_below_a_thousand_lines_of_code():
    assert sum(map(lines_of_code, sources("logra_ref"))) < 1000


def test_no_file_of_python_is_beyond_300_lines():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files() if path.suffix == ".py"}
    assert {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > 300} == {}


@pytest.mark.parametrize("path", sources("logra_ref"), ids=lambda path: path.name)
def test_the_reference_imports_only_what_computes(path):
    """Nothing of the project's other parts, of ranks, files or the system."""
    allowed = {
        *("__future__", "collections", "contextlib", "dataclasses", "functools", "hashlib", "itertools", "math"),
        *("struct", "typing", "jaxtyping", "logra_ref", "numpy", "torch"),
    }
    assert {name for name in imports(path) if name.split(".")[0] not in allowed} == set()


@pytest.mark.parametrize("path", sources("logra_ref"), ids=lambda path: path.name)
def test_the_reference_neither_reads_nor_writes_nor_knows_of_ranks(path):
    forbidden = {"open", "print", "input", "torch.save", "torch.load", "torch.distributed"}
    named = {dotted(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Name | ast.Attribute)}
    assert {name for name in named | imports(path) if any(f"{name}.".startswith(f"{f}.") for f in forbidden)} == set()


@pytest.mark.parametrize("path", sources("logra_ref", "scaled", "validation"), ids=lambda path: path.name)
def test_nothing_runs_or_unpickles_what_it_was_given(path):
    unpickling = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    assert {name for name in imports(path) if name.split(".")[0] in unpickling} == set()
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        assert name not in {"eval", "exec", "compile", "__import__", "os.system"}, f"{name}, line {node.lineno}"
        assert not name.endswith(("parse_expr", "sympify")), f"{name}, line {node.lineno}"
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if name == "torch.load":
            assert ast.unparse(given.get("weights_only", ast.Constant(None))) == "True", f"line {node.lineno}"
        assert "shell" not in given, f"a shell, line {node.lineno}"
        if name.startswith("yaml."):
            assert name != "yaml.load", f"yaml.safe_load is the safe one, line {node.lineno}"


# In pieces, so that this file doesn't name them either.
ELSEWHERE = "|".join(
    [
        "pypi" + r"\.org",
        "python" + "hosted",
        "deb" + r"\.debian",
        "registry" + r"\.npmjs",
        "download" + r"\.pytorch",
        r"(?<![\w.])/" + "(work|root)/",
        "/opt/" + "(wheels|pypi)",
        r"(?<![\w.])/" + r"(home|Users)/\w",
    ]
)


def test_no_file_names_a_registry_or_a_path_of_one_machine():
    named = {}
    for path in files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        if found := re.search(ELSEWHERE, text):
            named[str(path.relative_to(ROOT))] = found[0]
    assert named == {}


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    return [Requirement(text) for text in [*PROJECT["dependencies"], *(r for group in extras.values() for r in group)]]


def locked() -> dict[str, str]:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    rows = [line.split("==") for line in text.splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in rows}


def test_every_requirement_is_pinned():
    assert [str(r) for r in requirements() if {s.operator for s in r.specifier} not in ({"=="}, {"~="})] == []
    assert {"torch==2.13.0", "transformers==5.19.0"} <= set(PROJECT["dependencies"])


def test_the_lock_has_every_requirement_of_the_environment_without_a_build_tag():
    lock = locked()
    extras = PROJECT["optional-dependencies"]
    needed = [Requirement(r) for r in [*PROJECT["dependencies"], *extras["dev"], *extras["notebooks"]]]
    outside = [str(r) for r in needed if not r.specifier.contains(lock.get(canonicalize_name(r.name), "0"))]
    assert outside == []
    assert [version for version in lock.values() if "+" in version] == []


@pytest.mark.parametrize("folder", ["logra_ref", "scaled", "validation"])
def test_every_import_is_of_a_declared_requirement(folder):
    """Not of what happens to be installed for another package's sake."""
    modules = {name.split(".")[0] for path in sources(folder) for name in imports(path)}
    outside = modules - set(sys.stdlib_module_names) - {"logra_ref", "scaled", "validation"}
    extras = [Requirement(one) for some in PROJECT["optional-dependencies"].values() for one in some]
    peers = (ROOT / "constraints-peers.txt").read_text(encoding="utf-8")  # in a folder of their own
    outside -= {name.replace("-", "_") for name in re.findall(r"^([\w-]+)==", peers, re.MULTILINE)}
    outside -= {"vllm", "wandb"} & {one.name for one in extras}  # declared, and not installed in this environment
    declared = {canonicalize_name(requirement.name) for requirement in requirements()}
    distributions = packages_distributions()
    owners = {module: {canonicalize_name(name) for name in distributions.get(module, [])} for module in outside}
    assert {module for module in outside if not owners[module] & declared} == set()


def test_shapes_of_the_reference_are_checked_while_tests_run():
    with pytest.raises(jaxtyping.TypeCheckError):
        exact_kl(torch.zeros(2, 3), torch.zeros(2, 4), 1.0)


@pytest.mark.parametrize(
    "path", [path for path in files() if path.suffix in (".md", ".ipynb")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_link_to_a_file_leads_to_one(path):
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    local = [link.partition("#")[0] for link in links if not re.match(r"https?:|#", link)]
    assert [link for link in local if re.search(r"[./]", link) and not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").rglob("*.ipynb")), ids=lambda path: path.name)
def test_every_cell_of_a_notebook_was_run_in_order_without_error_and_is_compared(path):
    cells = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert not any(o["output_type"] == "error" or o.get("name") == "stderr" for o in cell["outputs"])
        assert not re.search(r"NBVAL_\w+", "".join(cell["source"]))
        assert not cell["metadata"].get("tags")


def test_every_notebook_has_its_solutions():
    numbered = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert [name[:2] for name in numbered] == [f"{number:02d}" for number in range(11)]
    assert sorted(path.name for path in (ROOT / "notebooks" / "solutions").glob("*.ipynb")) == numbered
