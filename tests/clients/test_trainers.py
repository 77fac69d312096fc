"""Trainers of other libraries, unmodified, that give ``rjax serve`` new weights."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .environments import SCRIPTS, TRAINERS
from .test_clients import missing, run_tasks
from .tiny_checkpoint import write_checkpoint

TASKS = {
    "trl": ("grpo", "update", "async_trainer"),
    "google-tunix": ("rollout", "grpo"),
    "skyrl": ("sample",),
    "verl": ("standalone", "hybrid"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command's server of that checkpoint, without a path."""
    command = [
        *(sys.executable, "-m", "rjax.serve", "--model", str(folder), "--port", "0"),
        *("--warmup", "off", "--dtype", "float32", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "64", "--page-size", "8", "--num-pages", "256"),
        *("--enable-weight-updates", "--logprobs-mode", "processed_logprobs"),
        *("--drain-seconds", "1"),
    ]
    log = tmp_path_factory.mktemp("trainers") / "stderr"
    with log.open("w") as errors, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as started:  # fmt: skip
        assert started.stdout is not None
        line = started.stdout.readline()
        assert " on " in line, log.read_text()
        yield line.split(" on ")[1].strip().removesuffix("/v1")
        started.terminate()
        assert started.wait(60) == 0, log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_trainer(name: str, folder: Path, request: pytest.FixtureRequest):
    client = TRAINERS[name]
    assert client.installed(), missing(client)
    url = "" if client.is_library else request.getfixturevalue("url")
    run_tasks(client, url, TASKS[name], model_folder=str(folder))


def test_every_trainer_has_its_files():
    for client in TRAINERS.values():
        lines = client.requirements.read_text().splitlines()
        assert client.name in {line.split("==")[0] for line in lines}
        assert all("==" in line for line in lines if line)
        assert (SCRIPTS / client.script).is_file()
    assert set(TASKS) == set(TRAINERS)
