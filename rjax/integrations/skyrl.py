"""A JAX backend of SkyRL's Tinker engine that samples with rjax; needs skyrl.

SkyRL trains LoRA adapters over a base model that does not change. rjax serves one set of weights,
so the adapter of a request is merged into them before it is sampled from.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.renderer import render_model_input
from skyrl.tinker import types
from skyrl.tx.layers.lora import FusedLoRALinear
from skyrl.tx.layers.stacked import unstack_state
from skyrl.tx.utils.models import get_expert_key, get_fused_info, get_param_key

from rjax import LLM, SamplingParams
from rjax.inputs import TokensPrompt
from rjax.outputs import RequestOutput, token_chances


class RjaxBackendConfig(JaxBackendConfig):
    """Configuration of the backend.

    Attributes:
        rjax: options of `rjax.LLM`, such as ``max_model_len`` and ``gpu_memory_utilization``, which
            leaves room for the trainer.
    """

    rjax: dict[str, Any] = Field(default_factory=dict, description="options of rjax.LLM")


@dataclasses.dataclass(frozen=True)
class AdapterVersion:
    """The weights of a sample: those of the base model if both are empty.

    Attributes:
        model_id: of the adapter.
        checkpoint_id: of its weights.
    """

    model_id: str
    checkpoint_id: str


class RjaxBackend(JaxBackend):
    """SkyRL's JAX backend, whose `sample` runs in rjax on the same devices.

    The samples of a prompt share its KV, and read it once per step. Requests of several adapters in
    one batch are sampled one adapter after another. One process only.

    Args:
        base_model: name or folder of the base model, which both engines load.
        config: configuration.
    """

    def __init__(self, base_model: str, config: RjaxBackendConfig) -> None:
        if config.coordinator_address is not None:
            raise ValueError("RjaxBackend samples in one process; leave out coordinator_address")
        super().__init__(base_model, config)
        self.llm = LLM(base_model, **{"use_tqdm": False, **config.rjax})
        self._merged = AdapterVersion("", "")

    def sample(
        self, prepared_batch: types.PreparedSampleBatch
    ) -> dict[str, types.SampleOutput | types.ErrorResponse]:
        """Sample for a batch of requests; a request that the engine refuses gets its error."""
        batch = prepared_batch
        if not batch.all_model_inputs:
            return {}
        adapters = self.load_sampler_weights(batch)
        prompts = [list(r.prompt_ids) for r in render_model_input(batch.all_model_inputs)]
        rows = range(len(prompts))
        tops = [0] * len(prompts)
        scored = [False] * len(prompts)
        for _, _, start, end, wants_logprobs, top in batch.request_batch_slices:
            tops[start:end] = [top] * (end - start)
            scored[start] = wants_logprobs or top > 0  # of one of its samples
        versions = [
            AdapterVersion(*key)
            for key in zip(batch.all_model_ids, batch.all_checkpoint_ids, strict=True)
        ]
        outputs: dict[int, RequestOutput] = {}
        by_adapter = sorted(rows, key=lambda row: adapters[row])
        for adapter, group in itertools.groupby(by_adapter, key=lambda row: adapters[row]):
            members = list(group)
            self._merge(adapter, versions[members[0]])
            params = [
                _params(batch.all_sampling_params[row], tops[row] if scored[row] else None)
                for row in members
            ]
            given = [TokensPrompt(prompt_token_ids=prompts[row]) for row in members]
            outputs |= zip(members, self.llm.generate(given, params), strict=True)
        return {
            name: _result([outputs[row] for row in range(start, end)], wants_logprobs, top)
            for name, _, start, end, wants_logprobs, top in batch.request_batch_slices
        }

    def delete_model(self, model_id: str) -> None:
        """See `JaxBackend`. A later model of this name has other weights."""
        super().delete_model(model_id)
        if self._merged.model_id == model_id:
            self._merged = AdapterVersion(model_id, "")

    def _merge(self, adapter: int, version: AdapterVersion) -> None:
        """Give the engine the base weights with this adapter, unless it has them."""
        wanted = version if adapter else AdapterVersion("", "")
        if wanted == self._merged:
            return
        with jax.set_mesh(self.mesh):
            model = nnx.merge(self.graphdef, self.lora_params, self.non_lora_params)
            self.llm.update_weights(merged_weights(model, adapter), partial=True)
        self._merged = wanted


def merged_weights(model: nnx.Module, adapter: int) -> Iterator[tuple[str, jax.Array]]:
    """The weights of a SkyRL model that have adapters, each with the adapter added.

    Args:
        model: the model.
        adapter: index of the adapter; that of the base model, 0, adds nothing.

    Yields:
        Names and tensors of a Hugging Face checkpoint.

    Raises:
        NotImplementedError: the adapter changes embeddings that are tied to the output projection,
            which a sum of weights cannot express.
    """
    fused = get_fused_info(model)
    state = {tuple(path): leaf for path, leaf in nnx.to_flat_state(unstack_state(model))}
    for path, leaf in state.items():
        *place, last = path
        if last not in ("kernel", "embedding", "weight") or (*place, "lora_A") not in state:
            continue
        weight = leaf[...]
        if adapter:
            first, second = (state[*place, name][...][adapter] for name in ("lora_A", "lora_B"))
            is_tied = last == "embedding" and getattr(model, "lm_head", None) is None
            if is_tied and jnp.any(second != 0):
                raise NotImplementedError(
                    "the adapter changes tied embeddings; train it without embeddings"
                )
            scale = state[*place, "lora_scaling"][...][adapter]
            delta = jnp.matmul(first, second, preferred_element_type=jnp.float32) * scale
            weight = (weight + delta.reshape(weight.shape)).astype(weight.dtype)
        yield from _tensors(path, weight, fused)


def _tensors(
    path: Sequence[Any], weight: jax.Array, fused: dict[str, Any]
) -> Iterator[tuple[str, jax.Array]]:
    """A weight by the names and axes of a Hugging Face checkpoint."""
    *place, last = path
    if "experts" in place:
        for index, expert in enumerate(weight):
            yield get_expert_key(tuple(path), index), expert.T
    elif place[-1] in fused:
        components, sizes = fused[place[-1]]
        parts = FusedLoRALinear.split(weight, sizes)
        for name, part in zip(components, parts, strict=True):
            yield get_param_key((*place[:-1], name, last)), part.T
    elif last == "embedding":
        yield get_param_key(tuple(path)), weight
    else:
        yield get_param_key(tuple(path)), weight.T


def _params(given: types.SamplingParams, prompt_logprobs: int | None) -> SamplingParams:
    """rjax's parameters of one sample. SkyRL's logprobs are those of the raw logits."""
    return SamplingParams(
        temperature=given.temperature,
        max_tokens=given.max_tokens,
        seed=given.seed,
        top_k=0 if given.top_k == -1 else given.top_k,
        top_p=given.top_p,
        stop_token_ids=given.stop_tokens or [],
        stop=given.stop_strings or [],
        include_stop_str_in_output=True,
        ignore_eos=True,  # the request names its end tokens
        logprobs=0,
        prompt_logprobs=prompt_logprobs,
    )


def _result(
    outputs: list[RequestOutput], wants_logprobs: bool, top: int
) -> types.SampleOutput | types.ErrorResponse:
    """The result of one request, from the outputs of its samples."""
    sequences = []
    for output in outputs:
        if output.error is not None:
            return types.ErrorResponse(error=str(output.error), status="error")
        [sample] = output.outputs
        if sample.finish_reason not in ("stop", "length"):
            reason = f"a sample ended by {sample.finish_reason}"
            return types.ErrorResponse(error=reason, status="error")
        assert sample.logprobs is not None
        sequences.append(
            types.GeneratedSequence(
                stop_reason=sample.finish_reason,
                tokens=list(sample.token_ids),
                logprobs=[entry[0][1] for entry in token_chances(sample.logprobs)],
            )
        )
    tokens, scores = outputs[0].prompt_token_ids, outputs[0].prompt_logprobs
    result = types.SampleOutput(sequences=sequences)
    if scores is None:
        return result
    if wants_logprobs:
        result.prompt_logprobs = [
            None if entry is None else entry[token].logprob
            for token, entry in zip(tokens, scores, strict=True)
        ]
    if top:
        result.topk_prompt_logprobs = [
            None
            if entry is None
            else [(i, found.logprob) for i, found in entry.items() if found.rank <= top]
            for entry in scores
        ]
    return result
