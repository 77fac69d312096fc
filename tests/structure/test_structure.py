"""The shape of the code base, held by tests: imports, file lengths, what must be absent."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ["pallas_kernels", "models", "rjax", "bench", "tests"]
SOURCES = sorted(p for layer in LAYERS for p in (ROOT / layer).rglob("*.py"))
LONGEST = 500


def imports(path: Path) -> set[str]:
    """Top-level packages a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def layer_of(path: Path) -> int:
    return LAYERS.index(path.relative_to(ROOT).parts[0])


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    own = layer_of(path)
    # bench and tests are leaves: they stand side by side, and nothing imports them.
    allowed = set(LAYERS[: min(own, 3) + 1]) | {LAYERS[own]}
    if LAYERS[own] == "tests":
        allowed.add("bench")
    assert imports(path) & set(LAYERS) <= allowed


@pytest.mark.parametrize("layer", LAYERS[:3])
def test_the_packages_never_import_torch(layer):
    for path in (ROOT / layer).rglob("*.py"):
        assert not imports(path) & {"torch", "torchvision", "tensorflow"}, path


@pytest.mark.parametrize("layer", LAYERS[:4])
def test_nothing_unpickles_or_evaluates(layer):
    banned_modules = {"pickle", "dill", "marshal", "shelve", "cloudpickle"}
    banned_calls = {"eval", "exec", "compile", "__import__"}
    for path in (ROOT / layer).rglob("*.py"):
        assert not imports(path) & banned_modules, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in banned_calls, (path, node.lineno)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= LONGEST


def test_no_attic_and_no_copies():
    names = {p.stem for p in SOURCES} | {p.parent.name for p in SOURCES}
    assert not names & {"utils", "util", "helpers", "misc", "common", "v1", "v2", "experimental"}


def test_only_known_folders_hold_code():
    ignored = {".venv", "build", "dist"}
    tops = {p.relative_to(ROOT).parts[0] for p in ROOT.rglob("*.py")}
    assert {top for top in tops if not top.startswith(".")} - ignored <= set(LAYERS)


def test_ci_runs_the_commands_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    command = next(line for line in readme.splitlines() if line.endswith("-m pytest -n auto"))
    assert command in ci


def test_python_version_is_the_one_declared():
    declared = (ROOT / ".python-version").read_text().strip()
    assert sys.version_info[:2] >= tuple(int(x) for x in declared.split("."))
