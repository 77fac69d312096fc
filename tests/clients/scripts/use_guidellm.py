"""guidellm by its command: a few requests with its own prompts, and no errors."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tasks import Asked, run

REQUESTS = 4
TOKENS = 8


def benchmark(asked: Asked, route: str) -> None:
    """Run the command on one route and look at its report."""
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.json"
        command = [
            *(sys.executable, "-m", "guidellm", "run", "--disable-console-interactive"),
            "--backend",
            f"kind=openai_http,target={asked.url},model={asked.model},request_format={route}",
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=hf_auto,model={asked.tokenizer}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"),
            *("--output", f"kind=json,path={report}"),
        ]
        done = subprocess.run(
            command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        [found] = json.loads(report.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert totals["successful"] == REQUESTS, totals
    assert totals["errored"] == 0, found["requests"]["errored"]
    for request in found["requests"]["successful"]:
        assert request["output_tokens"] == TOKENS, request


def chat_completions(asked: Asked) -> None:
    benchmark(asked, "/v1/chat/completions")


def completions(asked: Asked) -> None:
    benchmark(asked, "/v1/completions")


run(chat_completions, completions)
