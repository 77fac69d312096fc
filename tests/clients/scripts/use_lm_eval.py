"""lm-eval by its command: log likelihoods of choices, and generated answers, on two APIs."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tasks import Asked, run

WRONG = ("Aruba", "Greenland", "Marshall Islands")
CHOICE = """
task: people_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
description: "{{{{system}}}}"
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 2
metric_list: [{{metric: acc}}]
"""
ANSWER = """
task: people_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
description: "{{{{system}}}}"
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[2]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 60, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def evaluate(
    asked: Asked, task: str, model: str, path: str, arguments: str, *, chat_template: bool = True
) -> dict[str, float]:
    """One run of the command; the scores of ``task``."""
    name = asked.country_answer.split(" is ")[0]
    choices = [f"{name} is {country}." for country in WRONG]
    choices.insert(2, asked.country_answer)
    line = {"system": asked.system, "question": asked.country_question, "choices": choices}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "people.jsonl").write_text(json.dumps(line) + "\n")
        for config in (CHOICE, ANSWER):
            text = config.format(data=folder / "people.jsonl")
            (folder / f"{text.split()[1]}.yaml").write_text(text)
        command = [
            *(sys.executable, "-m", "lm_eval", "run", "--model", model),
            *("--model_args", f"model={asked.model},base_url={asked.url}{path},{arguments}"),
            *("--include_path", made, "--tasks", task, "--output_path", f"{made}/out"),
            *("--batch_size", "2" if path == "/v1/completions" else "1"),
            *(["--apply_chat_template"] if chat_template else []),
        ]
        done = subprocess.run(
            command,
            env=os.environ | {"HF_HOME": made, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        [results] = (folder / "out").rglob("results_*.json")
        return json.loads(results.read_text())["results"][task]


def loglikelihood(asked: Asked) -> None:
    """Text prompts, scored by echo and logprobs, with the server's tokenizer."""
    found = evaluate(
        asked,
        "people_choice",
        "local-completions",
        "/v1/completions",
        "tokenizer_backend=remote,tokenized_requests=False",
        chat_template=False,
    )
    assert found["acc,none"] == 1.0, found


def chat_completions(asked: Asked) -> None:
    found = evaluate(
        asked,
        "people_answer",
        "local-chat-completions",
        "/v1/chat/completions",
        "tokenizer_backend=none",
    )
    assert found["exact_match,none"] == 1.0, found


run(loglikelihood, chat_completions)
