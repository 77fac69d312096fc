"""A rollout of verl that samples with rjax in the worker's process; needs verl.

verl finds it under a name in its registry::

    from verl.workers.rollout import base
    base._ROLLOUT_REGISTRY["rjax", "async"] = "rjax.integrations.verl.RjaxRollout"
"""

from collections.abc import AsyncIterable, Iterable
from typing import Any

from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import TokenOutput

from rjax import AsyncLLM, SamplingParams
from rjax.inputs import TokensPrompt
from rjax.outputs import token_chances
from rjax.sampling import RequestOutputKind

_BUCKET_BYTES = 256 * 2**20


class RjaxRollout(BaseRollout):
    """Serves a verl worker with samples, and takes the weights of its trainer.

    Args:
        config: verl's configuration of rollouts. Its ``engine_kwargs["rjax"]`` are further options
            of `rjax.AsyncLLM`.
        model_config: verl's configuration of the model; its folder holds the checkpoint.
        device_mesh: verl's; the engine's own is set by ``tensor_model_parallel_size``.
        replica_rank: number of this replica among several, of which verl asks.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        own = self.config
        self._length = own.max_model_len or own.prompt_length + own.response_length
        options = {
            "dtype": own.dtype,
            "max_model_len": self._length,
            "max_num_seqs": own.max_num_seqs,
            "max_num_batched_tokens": own.max_num_batched_tokens,
            "gpu_memory_utilization": own.gpu_memory_utilization,
            "tensor_parallel_size": own.tensor_model_parallel_size,
            "enable_prefix_caching": own.enable_prefix_caching,
            "logprobs_mode": own.logprobs_mode or "raw_logprobs",
            "load_format": own.load_format,
            "seed": own.seed,
            "use_tqdm": False,
            **own.engine_kwargs.get("rjax", {}),
        }
        self.replica_rank = replica_rank
        self.global_steps: int | None = None
        self.llm = AsyncLLM(self.model_config.local_path, **options)

    async def resume(self, tags: list[str]) -> None:
        """Take back device memory for the weights, the KV pool, or both.

        Args:
            tags: "weights" and "kv_cache".
        """
        if self.config.free_cache_engine:
            await self.llm.wake_up(tags)

    async def release(self) -> None:
        """Give back the device memory of the weights and of the KV pool; `update_weights` brings
        the weights after `resume`."""
        if self.config.free_cache_engine:
            await self.llm.sleep(level=2)

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Use the trainer's weights, all of them or none.

        Args:
            weights: names and tensors of a checkpoint, in an order of verl's. Each is copied on its
                device, because verl may use its memory for the next one.
            wire_format: "named_tensors".
            global_steps: the trainer's step, which later outputs have in ``extra_fields``.
            kwargs: of verl for other engines; adapters are refused.

        Raises:
            NotImplementedError: another format, or the weights of an adapter.
            InvalidWeightsError: see `rjax.LLM.update_weights`; the old weights stay in use.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(
                f"wire_format is {wire_format!r}; set checkpoint_engine.backend to one that sends "
                "'named_tensors', whole tensors"
            )
        if kwargs.get("peft_config") is not None and kwargs.get("base_sync_done", False):
            raise NotImplementedError(
                "the trainer sends an adapter, which the engine does not have; set "
                "model.lora.merge so that it sends merged weights"
            )
        await self.llm.start_weight_update()
        try:
            bucket: list[tuple[str, Any]] = []
            size = 0
            async for name, tensor in _async_items(weights):
                bucket.append((name, tensor.detach().clone()))
                size += tensor.numel() * tensor.element_size()
                if size >= _BUCKET_BYTES:
                    await self.llm.add_weights(bucket)
                    bucket, size = [], 0
            await self.llm.add_weights(bucket)
            await self.llm.finish_weight_update()
        finally:
            await self.llm.cancel_weight_update()
        self.global_steps = global_steps

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        *,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Sample an answer to a prompt, as verl's agent loops ask for one.

        Args:
            prompt_ids: token ids of the prompt.
            sampling_params: fields of `rjax.SamplingParams`; ``logprobs`` is true or false.
            request_id: unique among unfinished requests.
            image_data, video_data, audio_data: nothing; models take text only.
            priority: smaller runs earlier.

        Raises:
            ValueError: there is media, or the prompt leaves no room for an answer.
        """
        if image_data or video_data or audio_data:
            raise ValueError("the request has images, videos or audio; models take text only")
        own, given = self.config, dict(sampling_params)
        most = given.pop("max_tokens", given.pop("max_new_tokens", None))
        if most is None:
            most = min(
                own.response_length, own.prompt_length + own.response_length - len(prompt_ids)
            )
        given["max_tokens"] = max(1, min(most, self._length - len(prompt_ids)))
        given["logprobs"] = 0 if given.pop("logprobs", False) else None
        if given.get("top_k") == -1:
            given["top_k"] = 0
        given.setdefault("repetition_penalty", own.repetition_penalty)
        given.setdefault("ignore_eos", own.ignore_eos)
        if own.full_determinism:
            given.setdefault("seed", max(self.replica_rank, 0) + own.seed)
        params = SamplingParams(**given, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = TokensPrompt(prompt_token_ids=list(prompt_ids))
        last = None
        async for output in self.llm.generate(
            prompt, params, request_id=request_id, priority=priority
        ):
            last = output
        assert last is not None
        [sample] = last.outputs
        logprobs = None
        if sample.logprobs is not None:
            logprobs = [entry[0][1] for entry in token_chances(sample.logprobs)]
        reason = sample.finish_reason
        return TokenOutput(
            token_ids=list(sample.token_ids),
            log_probs=logprobs,
            stop_reason={"abort": "aborted", "error": "error"}.get(reason or "", "completed"),
            extra_fields={
                "global_steps": self.global_steps,
                "num_cached_tokens": last.num_cached_tokens,
            },
        )


async def _async_items(
    weights: Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]],
) -> AsyncIterable[tuple[str, Any]]:
    """The items of an iterable of either kind."""
    if isinstance(weights, AsyncIterable):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item
