"""lm-eval by its command: choices by their log likelihood and generated answers, on two APIs."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import requests
from tasks import Asked, run

WRONG = ("Aruba", "Greenland", "Marshall Islands")
TASK = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
description: "{{{{system}}}}"
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
"""
CHOICE = """
doc_to_choice: "{{choices}}"
doc_to_target: 2
metric_list: [{metric: acc}]
"""
ANSWER = """
doc_to_target: "{{choices[2]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 60, temperature: 0}
metric_list: [{metric: exact_match}]
"""
KINDS = {
    "people_choice": ("multiple_choice", CHOICE),
    "people_answer": ("generate_until", ANSWER),
}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def evaluate(asked: Asked, task: str, path: str, arguments: str, *, chat_template: bool) -> float:
    """The score of one run of the command.

    Args:
        asked: the question.
        task: of ``KINDS``.
        path: of the server.
        arguments: of the client's model.
        chat_template: whether the client is to lay out the messages. If not, the question is laid
            out already.
    """
    name = asked.country_answer.split(" is ")[0]
    choices = [f"{name} is {country}." for country in WRONG]
    choices.insert(2, asked.country_answer)
    line = {"system": asked.system, "question": asked.country_question, "choices": choices}
    if not chat_template:
        line |= {"system": "", "question": laid_out(asked)}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "people.jsonl").write_text(json.dumps(line) + "\n")
        kind, rest = KINDS[task]
        config = TASK.format(task=task, kind=kind, data=folder / "people.jsonl")
        (folder / f"{task}.yaml").write_text(config + rest)
        model = "local-chat-completions" if path == CHAT else "local-completions"
        command = [
            *(sys.executable, "-m", "lm_eval", "run", "--model", model),
            *("--model_args", f"model={asked.model},base_url={asked.url}{path},{arguments}"),
            *("--include_path", made, "--tasks", task, "--output_path", f"{made}/out"),
            *("--batch_size", "1" if path == CHAT else "2"),
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
        found = json.loads(results.read_text())["results"][task]
    return found["acc,none" if task == "people_choice" else "exact_match,none"]


def laid_out(asked: Asked) -> str:
    """The text of the first turn's prompt, by the server's chat template."""

    def post(path: str, **body: object) -> dict[str, object]:
        return requests.post(asked.url + path, json=body, timeout=60).json()

    return post("/detokenize", tokens=post("/tokenize", messages=asked.first_turn)["tokens"])[
        "prompt"
    ]


def loglikelihood(asked: Asked) -> None:
    """Text prompts, scored by echo and logprobs, with the server's tokenizer."""
    arguments = "tokenizer_backend=remote,tokenized_requests=False"
    found = evaluate(asked, "people_choice", COMPLETIONS, arguments, chat_template=False)
    assert found == 1.0


def token_loglikelihood(asked: Asked) -> None:
    """Prompts as the token ids of the server's tokenizer, which the client finds by itself."""
    found = evaluate(asked, "people_choice", COMPLETIONS, "max_retries=1", chat_template=False)
    assert found == 1.0


def template_loglikelihood(asked: Asked) -> None:
    """Messages that the client lays out with its own copy of the tokenizer."""
    arguments = f"tokenizer_backend=huggingface,tokenizer={asked.tokenizer}"
    found = evaluate(asked, "people_choice", COMPLETIONS, arguments, chat_template=True)
    assert found == 1.0


def template_completions(asked: Asked) -> None:
    """Messages that the server's tokenizer lays out; the prompts are its token ids."""
    arguments = "tokenizer_backend=remote"
    found = evaluate(asked, "people_answer", COMPLETIONS, arguments, chat_template=True)
    assert found == 1.0


def chat_completions(asked: Asked) -> None:
    """Messages to the chat route."""
    found = evaluate(asked, "people_answer", CHAT, "tokenizer_backend=none", chat_template=True)
    assert found == 1.0


run(
    loglikelihood,
    token_loglikelihood,
    template_loglikelihood,
    template_completions,
    chat_completions,
)
