"""A rollout of Tunix that samples with rjax; needs google-tunix.

Give the class to Tunix as the engine of a cluster's rollouts::

    from functools import partial
    from rjax.integrations.tunix import RjaxRollout

    ClusterConfig(rollout_engine=partial(RjaxRollout, checkpoint="Qwen/Qwen3-0.6B"), ...)
"""

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout import base_rollout

from rjax import LLM, SamplingParams
from rjax.config.logprobs_mode import LogprobsMode
from rjax.inputs import TokensPrompt
from rjax.models.adopting.mapping import WeightMapping
from rjax.outputs import CompletionOutput, token_chances


class RjaxRollout(base_rollout.BaseRollout):
    """Samples the answers of Tunix's trainers.

    Tunix repeats a prompt once for each of its samples; here equal prompts that follow one another
    are one request with that many samples, whose KV is stored once and read once per step.

    Args:
        rollout_actor: the trainer's model, whose parameters are used from the start.
        tokenizer: the trainer's.
        mesh: of Tunix; the engine's own is set by ``options``.
        rollout_config: sizes that Tunix asks for; ``kv_cache_size`` is the engine's
            ``max_model_len``, unless ``options`` has it.
        checkpoint: folder or name of a checkpoint with the model's configuration. Its weights are
            not loaded.
        mapping: names and axes of the model's parameters, as in `rjax.LLM.update_weights`.
        logprobs_mode: the distribution whose logprobs `generate` returns.
        options: of `rjax.LLM`.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: base_rollout.RolloutConfig | None = None,
        *,
        checkpoint: str,
        mapping: str | WeightMapping = "tunix",
        logprobs_mode: LogprobsMode = "processed_logprobs",
        **options: Any,
    ) -> None:
        is_adapted = isinstance(tokenizer, TokenizerAdapter)
        self._tokenizer = tokenizer if is_adapted else TokenizerAdapter(tokenizer)
        self._mapping = mapping
        self._logprobs_mode: LogprobsMode = logprobs_mode
        options = {"load_format": "dummy", "use_tqdm": False, **options}
        if rollout_config is not None:
            options.setdefault("max_model_len", rollout_config.kv_cache_size)
        # On a thread of its own the engine sees no mesh and no transfer guard of the trainer's,
        # which hold for a thread and are part of the keys of compiled programs.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rjax-rollout")
        self.llm: LLM = self._thread.submit(lambda: LLM(checkpoint, **options)).result()
        self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(
        self, prompts: list[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """Sample an answer to each prompt.

        Args:
            prompts: texts.
            rollout_config: how to sample; the fields for other engines have no effect.
            kwargs: further fields of `rjax.SamplingParams`.
        """
        tokens = [self._encode(prompt) for prompt in prompts]
        groups = [(ids, len(list(same))) for ids, same in itertools.groupby(tokens)]
        params = [
            self._params(rollout_config, count, index, kwargs)
            for index, (_, count) in enumerate(groups)
        ]
        given = [TokensPrompt(prompt_token_ids=list(ids)) for ids, _ in groups]
        outputs = self._thread.submit(self.llm.generate, given, params).result()
        for output in outputs:
            if output.error is not None:
                raise output.error
        samples = [sample for output in outputs for sample in output.outputs]
        logprobs = None
        if rollout_config.return_logprobs:
            logprobs = [_sampled_logprobs(sample) for sample in samples]
        return base_rollout.RolloutOutput(
            text=[sample.text for sample in samples],
            logits=None,  # pyright: ignore[reportArgumentType]  # as Tunix's other engines
            tokens=[np.array(sample.token_ids, np.int32) for sample in samples],
            left_padded_prompt_tokens=self._left_padded(tokens, rollout_config.max_prompt_length),
            logprobs=logprobs,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Logprobs of given answers.

        Args:
            prompt_tokens: left-padded prompts, [B, P].
            completion_tokens: right-padded answers, [B, Z].

        Returns:
            The raw logprob of each answer's token, float32 [B, Z]; 0 for padding.
        """
        pad = self.pad_id()
        prompts = [_without_padding(row[::-1], pad)[::-1] for row in np.asarray(prompt_tokens)]
        answers = [_without_padding(row, pad) for row in np.asarray(completion_tokens)]
        found = self._thread.submit(
            self.llm.get_per_token_logps,
            [row.tolist() for row in prompts],
            [row.tolist() for row in answers],
        ).result()
        padded = np.zeros(completion_tokens.shape, np.float32)
        for row, logprobs in zip(padded, found, strict=True):
            row[: len(logprobs)] = logprobs
        return jnp.asarray(padded)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Use new parameters.

        Args:
            params: all parameters of the trainer's model, a tree.
            filter_types: their kinds of Flax variables.

        Raises:
            NotImplementedError: the parameters are those of an adapter.
            InvalidWeightsError: see `rjax.LLM.update_weights`; the old ones stay in use.
        """
        names = [getattr(kind, "__name__", "") for kind in filter_types or ()]
        if "LoRAParam" in names:
            raise NotImplementedError(
                "the trainer updates the LoRA parameters alone, which the engine does not have; "
                "train all parameters"
            )
        self._thread.submit(lambda: self.llm.update_weights(params, mapping=self._mapping)).result()

    def pad_id(self) -> int:
        """Token id of padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Token id that ends an answer."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """None: no Flax model has the engine's weights. With one that shares the trainer's, Tunix
        would not update them. ``offload_to_cpu`` of its cluster needs one, and must be false."""

    def close(self) -> None:
        """End the engine."""
        self._thread.submit(self.llm.close).result()
        self._thread.shutdown()

    def _encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids as Tunix's samplers have them: with one BOS token if there is one."""
        bos = self._tokenizer.bos_id()
        ids = [*([bos] if bos else []), *self._tokenizer.encode(prompt)]
        return tuple(self._tokenizer.dedup_bos_ids(ids))

    def _params(
        self,
        config: base_rollout.RolloutConfig,
        count: int,
        index: int,
        more: dict[str, Any],
    ) -> SamplingParams:
        """Sampling parameters of the ``index``th group of equal prompts."""
        seed = None if config.seed is None else (_number(config.seed) + index) % 2**63
        options: dict[str, Any] = {
            "n": count,
            "max_tokens": config.max_tokens_to_generate,
            "temperature": config.temperature,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "top_k": 0 if config.top_k in (None, -1) else config.top_k,
            "seed": seed,
            "ignore_eos": True,  # the trainer's end tokens count
            "stop_token_ids": config.eos_tokens or [self.eos_id()],
            **more,
        }
        if config.return_logprobs:
            options |= {"logprobs": 0, "logprobs_mode": self._logprobs_mode}
        return SamplingParams(**options)

    def _left_padded(self, prompts: Sequence[Sequence[int]], width: int) -> np.ndarray:
        """Prompts [B, P]; P is ``width``, or a power of two if that is too narrow."""
        longest = max(map(len, prompts))
        if width < longest:
            width = 1 << (longest - 1).bit_length()
        padded = np.full((len(prompts), width), self.pad_id(), np.int32)
        for row, tokens in zip(padded, prompts, strict=True):
            row[width - len(tokens) :] = tokens
        return padded


def _sampled_logprobs(sample: CompletionOutput) -> np.ndarray:
    assert sample.logprobs is not None
    return np.array([entry[0][1] for entry in token_chances(sample.logprobs)], np.float32)


def _without_padding(row: np.ndarray, pad: int) -> np.ndarray:
    """A row [Z] up to its last token that is not padding."""
    (places,) = np.nonzero(row != pad)
    return row[: places[-1] + 1] if places.size else row[:0]


def _number(seed: Any) -> int:
    """A seed as a number: of an integer, or of a JAX key."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed).reshape(-1).astype(np.uint64)
    return sum(int(word) << 32 * i for i, word in enumerate(words[::-1])) % 2**63
