"""Common clients, unmodified, against ``python -m rjax.serve`` with the bundled model."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.train_bundled_model.make_demo import demo_table
from bench.train_bundled_model.table import Table, system_prompt
from rjax.build.engine_builder import build_engine
from rjax.config import EngineConfig
from rjax.models import BUNDLED_MODEL
from tests.bundled import BUNDLED_SIZES
from tests.serve.live_server import live_server

from .environments import CLIENTS, SCRIPTS, TRAINERS, Client

ROOT = Path(__file__).parents[2]
TASKS = {
    "openai": (
        *("chat", "stream", "second_turn", "at_once", "tools", "streamed_tools", "structured"),
        *("completions", "responses"),
    ),
    "pydantic-ai": (
        *("chat", "stream", "second_turn", "tools", "structured", "streamed_structured"),
        "responses",
    ),
    "instructor": ("by_tools", "by_strict_tools", "by_json_schema", "partial", "second_turn"),
    "langchain-openai": (
        *("chat", "stream", "second_turn", "tools", "streamed_tools", "structured"),
        "completions",
    ),
    "litellm": ("chat", "stream", "second_turn", "tools", "structured", "completions"),
    "lm-eval": (
        *("loglikelihood", "token_loglikelihood", "template_loglikelihood"),
        *("template_completions", "chat_completions"),
    ),
    "guidellm": ("chat_completions", "completions"),
}

# In every run: one forced call or object of each light client, and a plain answer.
QUICK = {
    "openai": ("chat", "tools"),
    "pydantic-ai": ("structured",),
    "instructor": ("by_tools",),
}


@pytest.fixture(scope="module")
def command_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command's server with the bundled model, without a path."""
    command = [
        *(sys.executable, "-m", "rjax.serve", "--port", "0", "--warmup", "off"),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "256"),
        *("--max-model-len", "2048", "--num-pages", "128", "--drain-seconds", "1"),
        "--enable-tokenizer-info-endpoint",
    ]
    log = tmp_path_factory.mktemp("clients") / "stderr"
    with log.open("w") as errors, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as started:  # fmt: skip
        assert started.stdout is not None
        line = started.stdout.readline()
        assert " on " in line, log.read_text()
        yield line.split(" on ")[1].strip().removesuffix("/v1")
        started.terminate()
        assert started.wait(60) == 0, log.read_text()


@pytest.fixture(scope="module")
def thread_url(optimised: None, kept: None) -> Iterator[str]:
    """The same server on a thread, with programs that the test run has compiled already."""
    engine = build_engine(EngineConfig.from_options({"use_tqdm": False, **BUNDLED_SIZES}))
    with live_server(engine, model="tables") as found:
        yield found.url


def asked(url: str) -> dict[str, str]:
    """Questions about six people, with right answers that the table itself gives."""
    table = demo_table()
    table = Table(table.columns, table.rows[:6])
    person = dict(zip(table.columns, table.rows[3], strict=True))
    name = person["name"]
    return {
        "url": url,
        "model": "tables",
        "tokenizer": str(BUNDLED_MODEL),
        "system": system_prompt(table),
        "country_question": f"Where does {name} live?",
        "country_answer": f"The country of {name} is {person['country']}.",
        "age_question": f"How old is {name}?",
        "age_answer": f"The age of {name} is {person['age']}.",
    }


def run_tasks(client: Client, url: str, tasks: tuple[str, ...], **more: str) -> None:
    """Run these tasks of a client in its environment; none may fail, and none be left out. ``more``
    is told to the script besides what is asked."""
    done = subprocess.run(
        [client.python, SCRIPTS / client.script, json.dumps(asked(url) | more), *tasks],
        capture_output=True,
        text=True,
        timeout=client.seconds,
        env=os.environ | ({"PYTHONPATH": str(ROOT)} if client.is_library else {}),
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    failed = {task: found for task, found in report.items() if found is not None}
    assert not failed, "\n".join(f"{task}:\n{found}" for task, found in failed.items())
    assert tuple(report) == tasks


def missing(client: Client) -> str:
    """What to do where an environment is missing."""
    return (
        f"the environment of {client.name} is missing or of other versions; "
        f"make it with: python -m tests.clients.environments {client.name}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_client(name: str, command_url: str):
    client = CLIENTS[name]
    assert client.installed(), missing(client)
    run_tasks(client, command_url, TASKS[name])


@pytest.mark.parametrize("name", QUICK)
def test_light_client(name: str, request: pytest.FixtureRequest):
    client = CLIENTS[name]
    if not client.installed():
        assert not request.config.getoption("--require-clients"), missing(client)
        pytest.skip(missing(client))
    run_tasks(client, request.getfixturevalue("thread_url"), QUICK[name])


def test_every_client_has_its_files():
    for client in CLIENTS.values():
        lines = client.requirements.read_text().splitlines()
        pinned = {line.split("==")[0] for line in lines if line}
        assert client.name in pinned or f"{client.name}-slim" in pinned
        assert all("==" in line for line in lines if line)
        assert (SCRIPTS / client.script).is_file()
    assert {path.stem for path in Path(SCRIPTS).glob("use_*.py")} == {
        Path(client.script).stem for client in (CLIENTS | TRAINERS).values()
    }
    assert set(TASKS) == set(CLIENTS)
    assert set(QUICK) == {client.name for client in CLIENTS.values() if client.light}
