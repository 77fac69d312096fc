"""TRL: its GRPO script on the CPU, and its two clients, which send weights to the server.

TRL sends weights from CUDA devices only. `cpu_counts_as_cuda` is the one thing that is changed: the
client's check of the device. The name vllm is that of `tests/clients/vllm_stub`.
"""

import contextlib
import json
import math
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import requests
import torch
from tasks import Asked, refused, run
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import weight_transfer
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

STEPS = 3
SAMPLES = 4


@contextlib.contextmanager
def cpu_counts_as_cuda() -> Iterator[None]:
    """TRL's clients take the CPU for a CUDA device, whose number they do not set."""
    device = SimpleNamespace(type="cuda", index=None)
    with mock.patch.object(vllm_client, "torch", SimpleNamespace(device=lambda _: device)):
        yield


def connect(given: Asked) -> VLLMClient:
    client = VLLMClient(base_url=given.url, group_port=weight_transfer.get_open_port())
    with cpu_counts_as_cuda():
        client.init_communicator(device="cpu")
    return client


def greedy(client: VLLMClient, tokens: list[int]) -> tuple[list[int], list[float]]:
    found = client.generate([tokens], temperature=0.0, max_tokens=8, logprobs=0)
    return found["completion_ids"][0], [entry[0] for entry in found["logprobs"][0]]


def cached_tokens(given: Asked, tokens: list[int]) -> int:
    found = requests.post(
        f"{given.url}/v1/completions", json={"prompt": tokens, "max_tokens": 1}, timeout=60
    ).json()
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


def load(folder: str | Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def check_weights(given: Asked, client: VLLMClient, model: torch.nn.Module) -> None:
    """The server answers with these weights: its logprobs are those of transformers."""
    prompt = list(range(20, 60))
    answer, logprobs = greedy(client, prompt)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    wanted = torch.log_softmax(logits.float(), -1)
    assert answer == wanted.argmax(-1).tolist()
    wanted = wanted.gather(1, torch.tensor(answer)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), wanted, rtol=0, atol=1e-3)


def grpo(given: Asked) -> None:
    """`trl grpo` trains: its loss is finite, and the weights of the server change."""
    before = greedy(VLLMClient(base_url=given.url), list(range(20, 60)))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        data.mkdir()
        prompts = [{"prompt": f"Question {i}: who lives in Peru?"} for i in range(8)]
        Path(data, "train.jsonl").write_text("\n".join(map(json.dumps, prompts)))
        options = {
            "model_name_or_path": given.model_folder,
            "dataset_name": data,
            "reward_funcs": "rewards.reward",
            "output_dir": Path(folder, "out"),
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": given.url,
            "vllm_group_port": weight_transfer.get_open_port(),
            "dtype": "float32",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "max_steps": STEPS,
            "per_device_train_batch_size": SAMPLES,
            "gradient_accumulation_steps": 1,
            "num_generations": SAMPLES,
            "max_completion_length": 8,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "steps",
            "save_steps": STEPS,
            "report_to": "none",
            "disable_tqdm": True,
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        with mock.patch.object(sys, "argv", ["grpo", *arguments]), cpu_counts_as_cuda():
            runpy.run_module("trl.scripts.grpo", run_name="__main__")
        state = json.loads(
            Path(folder, "out", f"checkpoint-{STEPS}", "trainer_state.json").read_text()
        )
        logs = [entry for entry in state["log_history"] if "loss" in entry]
        assert len(logs) == STEPS
        for entry in logs:
            assert math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]), entry
            # Both engines give a sampled token the same probability, also after updates.
            assert entry["sampling/sampling_logp_difference/max"] < 1e-3, entry
        assert any(entry["grad_norm"] > 0 for entry in logs)
        after = greedy(VLLMClient(base_url=given.url), list(range(20, 60)))
        assert before[1] != after[1]
        client = connect(given)
        trained = load(Path(folder, "out"))
        client.update_model_params(trained)
        check_weights(given, client, trained)
        client.close_communicator()


def update(given: Asked) -> None:
    """New weights are used, KV of the old ones is not, and refused ones change nothing."""
    client, prompt = connect(given), list(range(30, 100))
    model = load(given.model_folder)
    client.update_model_params(model)
    check_weights(given, client, model)
    assert cached_tokens(given, prompt) == 0 < cached_tokens(given, prompt)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    client.update_model_params(model)
    assert cached_tokens(given, prompt) == 0 < cached_tokens(given, prompt)
    check_weights(given, client, model)
    wrong = next(iter(load(given.model_folder).state_dict()))
    found = refused(lambda: client.update_named_param(wrong, torch.zeros(3, 3)))
    assert wrong in found, found
    check_weights(given, client, model)
    assert cached_tokens(given, prompt) > 0
    client.close_communicator()


def async_trainer(given: Asked) -> None:
    """The client of TRL's asynchronous trainer: pause, update, resume."""
    model = load(given.model_folder)
    named = list(model.named_parameters())
    info = {
        "names": [name for name, _ in named],
        "dtype_names": [str(p.dtype).removeprefix("torch.") for _, p in named],
        "shapes": [list(p.shape) for _, p in named],
    }
    client = AsyncClient(given.url)
    assert client.get_dtype() == "torch.float32"
    transfer = weight_transfer.WeightTransferClient(client, info, weight_sync_timeout=60)
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(iter(named))
    transfer.resume()
    check_weights(given, VLLMClient(base_url=given.url), model)
    transfer.destroy()


run(grpo, update, async_trainer)
