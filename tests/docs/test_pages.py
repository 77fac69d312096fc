"""Commands, code, figures and messages on the pages hold for the code."""

import ast
import dataclasses
import importlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rjax.api.beam_search import BeamSearchParams
from rjax.config.option_docs import engine_options
from rjax.sampling import SamplingParams, StructuredOutputsParams
from rjax.serve.protocol import requests
from tests.docs.generated import filled, generated_pages
from tests.docs.pages import DOCS, PAGES, ROOT, Block, code_blocks
from tests.docs.processes import run_python
from tests.docs.shell_commands import check_arguments, commands

SHELL = code_blocks("sh", "bash", "console")
PYTHON = code_blocks("python", "py")
PROGRAMS = frozenset(
    (
        *(".", "cat", "chmod", "curl", "docker", "kubectl", "mkdir", "openssl", "pip", "printf"),
        *("python", "python3", "python3.12", "ray"),
    )
)
OTHER_MODULES = frozenset(("pytest", "trl.scripts.grpo", "venv", "verl.trainer.main_ppo"))
"""Programs and modules of others in shell blocks; their arguments are not checked."""

BODIES = {
    "/v1/completions": requests.CompletionRequest,
    "/v1/chat/completions": requests.ChatCompletionRequest,
    "/v1/prefixes": requests.PrefixRequest,
}
KEYWORDS = {
    "LLM": set(engine_options()),
    "AsyncLLM": set(engine_options()),
    **{
        kind.__name__: {field.name for field in dataclasses.fields(kind)}
        for kind in (SamplingParams, StructuredOutputsParams, BeamSearchParams)
    },
}


@pytest.mark.parametrize("page", generated_pages(), ids=lambda page: page.stem)
def test_generated_parts_are_up_to_date(page: Path):
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text, "run python -m tests.docs.generated"


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_shell_blocks(block: Block, monkeypatch: pytest.MonkeyPatch):
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    for program, *words in commands(block.text):
        program = program.removeprefix(".venv/bin/")
        is_module = program.startswith("python") and words[0] == "-m"
        if program == "rjax" or (is_module and words[1] not in OTHER_MODULES):
            check_arguments([program, *words], monkeypatch)
        else:
            assert program in PROGRAMS, block.text
        if program == "curl":
            check_body(words)


def check_body(words: list[str]) -> None:
    """Check the JSON body of a request to the server."""
    if "-d" not in words:
        return
    url = next(word for word in words if word.startswith("http"))
    body = json.loads(words[words.index("-d") + 1])
    kind = BODIES[re.sub(r"https?://[^/]+", "", url)]
    found = kind.model_validate(body)
    assert not found.model_extra


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_blocks(block: Block):
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            assert given <= KEYWORDS.get(node.func.id, given), node.func.id


@pytest.mark.slow
def test_the_code_about_sampling_in_a_jit_runs():
    blocks = [block for block in PYTHON if block.page == "docs/functional.md"]
    assert len(blocks) == 3
    code = "\n".join(block.text for block in blocks)
    said = run_python("-c", code, optimise=False)
    assert "(2, 4, 6) (2, 4, 6)" in said
    assert "(6, 4, 12)" in said


def test_wrong_arguments_are_found(monkeypatch: pytest.MonkeyPatch):
    for line in ("rjax serve llama --modle x", "python -m rjax.generate llama", "rjax sing"):
        [words] = commands(f"A=1 {line} > out.txt")
        with pytest.raises(AssertionError):
            check_arguments(words, monkeypatch)


def test_the_pages_show_code():
    assert len(SHELL) > 20
    assert len(PYTHON) > 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_figures_exist(page: Path):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http:", "https:", "#")):
            assert (page.parent / target.split("#")[0]).exists(), target


def source_texts() -> list[str]:
    """Every string of the packages, with ``…`` in place of what is filled in."""
    found = []
    for folder in ("rjax", "models", "pallas_kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def test_troubleshooting_quotes_real_messages():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^`([^`]+)`$", page, flags=re.MULTILINE)
    assert len(messages) > 35
    texts = [text for text in source_texts() if len(text) > 10]
    missing = [
        message for message in messages if not any(text.startswith(message) for text in texts)
    ]
    assert not missing


def test_the_options_named_as_in_vllm_exist():
    page = (DOCS / "vllm.md").read_text(encoding="utf-8")
    names = page.split("## Options with the same name")[1].split("On the command line")[0]
    found = [name for name in re.findall(r"`(\w+)`", names)]
    assert len(found) > 15
    assert set(found) <= set(engine_options())
    rows = page.split("## Options with another name")[1].split("\n## ")[0]
    second: list[Any] = re.findall(r"^\| [^|]+ \| `(\w+)", rows, flags=re.MULTILINE)
    assert len(second) > 5
    assert set(second) <= set(engine_options())
