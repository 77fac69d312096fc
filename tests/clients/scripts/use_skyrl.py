"""SkyRL: its JAX backend trains an adapter on the CPU, and samples from it with rjax.

Only names of torch and peft are imported on the way, and nothing of them is used: empty modules
stand for both.
"""

import sys
import types as python_types

import numpy as np
import transformers  # noqa: F401  # before the module below, which it would take for torch
from tasks import Asked, run

for name in ("torch", "peft"):
    sys.modules[name] = python_types.ModuleType(name)
sys.modules["torch"].dtype = sys.modules["torch"].Tensor = object

from skyrl.backends.jax import JaxBackend  # noqa: E402
from skyrl.tinker import types  # noqa: E402

from rjax.integrations.skyrl import RjaxBackend, RjaxBackendConfig  # noqa: E402

SIZES = {"max_lora_adapters": 3, "max_lora_rank": 4}
PROMPT = list(range(20, 50))
RJAX = {
    "dtype": "float32",
    "page_size": 8,
    "num_pages": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
}


def make_backend(given: Asked) -> RjaxBackend:
    return RjaxBackend(given.model_folder, RjaxBackendConfig(**SIZES, rjax=RJAX))


def batch_of(*requests: tuple[str, str, int], **params: object) -> types.PreparedSampleBatch:
    """Requests of (model, checkpoint, number of samples)."""
    rows = [request for request in requests for _ in range(request[2])]
    ends = np.cumsum([request[2] for request in requests]).tolist()
    given = {"temperature": 0.0, "max_tokens": 6, "seed": 5} | params
    return types.PreparedSampleBatch(
        all_model_inputs=[
            types.ModelInput(chunks=[types.EncodedTextChunk(tokens=PROMPT)]) for _ in rows
        ],
        all_sampling_params=[
            types.SamplingParams(**(given | {"seed": given["seed"] + i}))
            for i, _ in enumerate(rows)
        ],
        all_model_ids=[model for model, _, _ in rows],
        all_checkpoint_ids=[checkpoint for _, checkpoint, _ in rows],
        all_checkpoint_paths=["" for _ in rows],
        all_session_ids=[None for _ in rows],
        needs_prompt_logprobs=True,
        request_batch_slices=[
            (f"request-{i}", request[0], end - request[2], end, True, 0)
            for i, (request, end) in enumerate(zip(requests, ends, strict=True))
        ],
    )


def train(backend: RjaxBackend, model: str) -> None:
    """One large step of an adapter."""
    answer = list(range(60, 68))
    backend.forward_backward(
        types.PreparedModelPassBatch(
            all_model_inputs=[
                types.ModelInput(chunks=[types.EncodedTextChunk(tokens=PROMPT + answer[:-1])])
            ],
            all_targets=[PROMPT[1:] + answer],
            all_token_weights=[[0.0] * (len(PROMPT) - 1) + [1.0] * len(answer)],
            all_sampling_logprobs=[[0.0] * (len(PROMPT) + len(answer) - 1)],
            all_advantages=[[1.0] * (len(PROMPT) + len(answer) - 1)],
            all_values=[[]],
            all_returns=[[]],
            all_model_ids=[model],
            all_loss_fns=["cross_entropy"],
            all_loss_fn_configs=[None],
            request_batch_slices=[("train", model, 0, 1)],
        )
    )
    adam = types.AdamParams(learning_rate=0.05, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
    backend.optim_step(model, types.OptimStepInput(adam_params=adam))


def check_same(backend: RjaxBackend, batch: types.PreparedSampleBatch) -> dict[str, list[float]]:
    """rjax samples what SkyRL's own generator does, with its logprobs."""
    found, wanted = backend.sample(batch), JaxBackend.sample(backend, batch)
    assert found.keys() == wanted.keys()
    for name, result in found.items():
        for ours, theirs in zip(result.sequences, wanted[name].sequences, strict=True):
            assert ours.tokens == theirs.tokens, (name, ours, theirs)
            assert ours.stop_reason == theirs.stop_reason
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-3)
        assert result.prompt_logprobs[0] is None
        np.testing.assert_allclose(
            result.prompt_logprobs[1:], wanted[name].prompt_logprobs, atol=1e-3
        )
    return {name: result.sequences[0].logprobs for name, result in found.items()}


def sample(given: Asked) -> None:
    """Samples of the base model and of adapters, before and after a step of training."""
    backend = make_backend(given)
    for seed, model in enumerate(("first", "second")):
        backend.create_model(model, types.LoraConfig(rank=4, alpha=8.0, seed=seed))
    for model in ("first", "second"):
        backend.models[model].loaded_checkpoint_id = "0"  # in RAM, as behind a save
    requests = (("", "", 1), ("first", "0", 2), ("second", "0", 1))
    before = check_same(backend, batch_of(*requests))
    train(backend, "first")
    backend.models["first"].loaded_checkpoint_id = "1"
    requests = (("first", "1", 2), ("", "", 1), ("second", "0", 1))
    after = check_same(backend, batch_of(*requests))
    assert not np.allclose(after["request-0"], before["request-1"], atol=1e-2)
    assert np.allclose(after["request-1"], before["request-0"], atol=1e-6)
    drawn = backend.sample(batch_of(("first", "1", 4), temperature=1.0))["request-0"]
    assert len({tuple(sequence.tokens) for sequence in drawn.sequences}) > 1
    stop = drawn.sequences[0].tokens[2]
    [cut] = backend.sample(batch_of(("first", "1", 1), temperature=1.0, stop_tokens=[stop]))[
        "request-0"
    ].sequences
    assert cut.stop_reason == "stop" and cut.tokens[-1] == stop and len(cut.tokens) <= 3
    backend.llm.close()


run(sample)
