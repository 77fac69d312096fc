"""The shape of the code base, held by tests: imports, file lengths, what must be absent."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ["pallas_kernels", "models", "rjax", "bench", "tests"]
BELOW_RJAX = ("pallas_kernels", "models")  # by links in ``rjax/``
SOURCES = sorted(p for layer in LAYERS for p in (ROOT / layer).rglob("*.py"))
LONGEST = 480

RJAX_LAYERS = """
errors outputs
child_python closing console extras inputs vllm
config lora
tokenization
structured
sampling
batch
cli
engine utils worker
build functional
engine_channel
api
sampling_params
rjax
benchmarks chat examples serve
integrations replicas
commands generate quantize
__main__
"""
SERVE_LAYERS = """
page protocol
parsing
config telemetry
http
stores workers
api
loading
__main__
"""
"""Subpackages and modules of rjax and of its server, from the lowest layer to the highest. Each
imports only from layers above it in this list, so those that share a line do not import each other;
``rjax`` is ``rjax/__init__.py``. A ``__main__.py`` is the highest wherever it is."""


@functools.cache
def parsed(path: Path) -> tuple[list[ast.Import | ast.ImportFrom], list[tuple[str, int]]]:
    """The imports of a file, and the names and lines of the functions that it calls by name."""
    found, calls = [], []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            calls.append((node.func.id, node.lineno))
    return found, calls


def module_of(path: Path) -> str:
    """The dotted name of a file's module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in BELOW_RJAX:
        parts = ("rjax", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Those of these modules that a file imports, at its top or anywhere else in it."""
    found = set()
    for node in parsed(path)[0]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules if names <= modules else {node.module} | names
    return found & modules - {module_of(path)}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach one another (Tarjan's strongly connected components)."""
    found, order, low = [], {}, {}
    stack: list[str] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == order[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in order:
            visit(node)
    return found


@functools.cache
def imports(path: Path) -> set[str]:
    """Top-level packages a file imports; those below rjax by their own names."""
    found = set()
    for node in parsed(path)[0]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for top, *rest in (name.split(".") for name in names):
            assert top not in BELOW_RJAX, f"{path}:{node.lineno}: import rjax.{top}"
            found.add(rest[0] if top == "rjax" and rest and rest[0] in BELOW_RJAX else top)
    return found


def layer_of(path: Path) -> int:
    return LAYERS.index(path.relative_to(ROOT).parts[0])


def test_imports_point_one_way():
    offenders = {}
    for path in SOURCES:
        own = layer_of(path)
        # bench and tests are leaves: they stand side by side, and nothing imports them.
        allowed = set(LAYERS[: min(own, 3) + 1]) | {LAYERS[own]}
        if LAYERS[own] == "tests":
            allowed.add("bench")
        if above := imports(path) & set(LAYERS) - allowed:
            offenders[str(path.relative_to(ROOT))] = above
    assert offenders == {}


def test_no_modules_import_each_other_in_a_circle():
    paths = {module_of(path): path for path in SOURCES}
    assert circles({m: imported_modules(p, set(paths)) for m, p in paths.items()}) == []


def imports_inside(package: str) -> set[tuple[str, str]]:
    """(importer, imported) for the subpackages and modules of a package, without BELOW_RJAX."""
    paths = {module_of(path): path for path in SOURCES if layer_of(path) == LAYERS.index("rjax")}
    depth = package.count(".") + 1

    def part(module: str) -> str:
        parts = module.split(".")
        return "__main__" if parts[-1] == "__main__" else (parts[depth:] or [parts[-1]])[0]

    pairs = {
        (part(module), part(other))
        for module, path in paths.items()
        for other in imported_modules(path, set(paths))
        if module.startswith(package) and other.startswith(package)
    }
    return {(own, other) for own, other in pairs if own != other}


@pytest.mark.parametrize("name", BELOW_RJAX)
def test_the_lower_layers_are_imported_below_rjax(name):
    """`import rjax` must not take the names ``models`` and ``pallas_kernels`` from users."""
    assert (ROOT / "rjax" / name).readlink() == Path("..", name)


@pytest.mark.parametrize(
    ("package", "layers"), [("rjax", RJAX_LAYERS), ("rjax.serve", SERVE_LAYERS)]
)
def test_a_package_is_a_tree_of_layers(package, layers):
    rank = {
        name: number for number, layer in enumerate(layers.split("\n")) for name in layer.split()
    }
    entries = (ROOT / package.replace(".", "/")).glob("*")
    folders = [p for p in entries if not p.is_symlink()]
    found = {p.stem for p in folders if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert found - {"__init__"} == rank.keys() - {"rjax"}
    upward = {(own, other) for own, other in imports_inside(package) if rank[other] >= rank[own]}
    assert not upward


def test_the_packages_never_import_torch():
    banned = {"torch", "torchvision", "tensorflow"}
    checked = [path for path in SOURCES if layer_of(path) < 3]
    assert [path for path in checked if imports(path) & banned] == []


def test_nothing_unpickles_or_evaluates():
    banned_modules = {"pickle", "dill", "marshal", "shelve", "cloudpickle"}
    banned_calls = {"eval", "exec", "compile", "__import__"}
    # They read compiled programs, which are code whatever their format, and what a process of the
    # engine gets from it.
    folder = ROOT / "rjax" / "worker" / "programs"
    programs = folder / "cache.py", folder / "source.py"
    offenders = []
    for path in SOURCES:
        if LAYERS[layer_of(path)] == "tests":
            continue
        if path not in programs and imports(path) & banned_modules:
            offenders.append(str(path))
        calls = parsed(path)[1]
        offenders += [f"{path}:{line}" for name, line in calls if name in banned_calls]
    assert offenders == []


def test_files_stay_short():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: number for path, number in lines.items() if number > LONGEST} == {}


def test_no_attic_and_no_copies():
    of_vllm = ROOT / "rjax" / "utils"  # a module name that vLLM's scripts import
    assert {p.name for p in of_vllm.glob("*.py")} == {"__init__.py", "argparse_utils.py"}
    stub = ROOT / "tests" / "clients" / "vllm_stub"  # module names that TRL imports
    others = [p for p in SOURCES if p.parent != of_vllm and stub not in p.parents]
    names = {p.stem for p in others} | {p.parent.name for p in others}
    assert not names & {"utils", "util", "helpers", "misc", "common", "v1", "v2", "experimental"}


def test_only_the_commands_read_command_lines():
    """The rest of rjax takes dataclasses; scripts have vLLM's names of parsers."""
    own = {p.relative_to(ROOT) for p in (ROOT / "rjax").rglob("*.py") if "argparse" in imports(p)}
    shims = {"rjax/engine/arg_utils.py", "rjax/utils/argparse_utils.py"}
    allowed = tuple(map(Path, ("rjax/cli", "rjax/commands", "rjax/examples")))
    elsewhere = {p for p in own if not any(map(p.is_relative_to, allowed))}
    assert elsewhere == set(map(Path, shims))


def test_only_known_folders_hold_code():
    ignored = {".venv", "build", "dist"}
    tops = {p.relative_to(ROOT).parts[0] for p in ROOT.rglob("*.py")}
    assert {top for top in tops if not top.startswith(".")} - ignored <= set(LAYERS)


def test_ci_runs_the_commands_of_the_readme():
    """The one that makes the environment and the one that tests, with other checks in between."""
    readme = (ROOT / "README.md").read_text()
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    command = next(line for line in readme.splitlines() if " -m pytest -n auto " in line)
    environment, test = command.rsplit(" && ", 1)
    assert ci.index(environment) < ci.index(test)


def test_python_version_is_the_one_declared():
    declared = (ROOT / ".python-version").read_text().strip()
    assert sys.version_info[:2] >= tuple(int(x) for x in declared.split("."))


def test_processes_are_started_by_child_command():
    """`child_python` keeps the working folder, which may be a model's, from running code."""
    starts = re.compile(r"sys\.executable|multiprocessing\.(?!connection)")
    checked = (
        path
        for path in SOURCES
        if layer_of(path) == LAYERS.index("rjax")
        and path.parts[-2] != "examples"
        and path.name != "child_python.py"
    )
    assert [path for path in checked if starts.search(path.read_text("utf-8"))] == []
