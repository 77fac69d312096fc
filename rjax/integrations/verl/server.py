"""RjaxServer: the engine that verl's agent loops ask for tokens, in a Ray actor of its own."""

import asyncio
import os
from typing import Any

import ray
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_visible_devices_keyword
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from rjax.api.async_engine import AsyncLLMEngine
from rjax.config import EngineConfig
from rjax.integrations.verl.tensors import SentTensor, received
from rjax.outputs import token_chances
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.serve.api.app import build_app
from rjax.serve.config.addresses import HostAddress
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.server import Server
from rjax.serve.http.starting_app import StartingApp
from rjax.serve.loading.service_builder import make_service

_DRAIN_SECONDS = 0.05  # between two looks at the requests under way


class RjaxServer:
    """An engine behind the methods that verl calls of a server, and rjax's HTTP routes.

    Args:
        config: verl's configuration of rollouts. Its ``engine_kwargs["rjax"]`` are further options
            of `rjax.LLM`.
        model_config: verl's configuration of the model; its folder holds the checkpoint.
        rollout_mode: what shares the devices. In "hybrid" a sleep drops the weights, which the
            trainer sends again; in "colocated" it keeps them on the host; in "standalone" the
            engine never sleeps for the trainer.
        replica_rank: number of the replica, which is added to the seed.
        visible_devices: devices of the engine, as ``CUDA_VISIBLE_DEVICES`` has them; None leaves
            the process those that it has.

    Attributes:
        engine: the engine; set by `launch_server`.
        global_steps: the trainer's step of the weights.
    """

    engine: AsyncLLMEngine

    def __init__(
        self,
        config: Any,
        model_config: Any,
        rollout_mode: RolloutMode,
        replica_rank: int,
        visible_devices: str | None = None,
    ) -> None:
        if visible_devices is not None:  # before JAX looks for devices
            os.environ[get_visible_devices_keyword()] = visible_devices
        self.config = omega_conf_to_dataclass(config)
        self.model_config = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self.rollout_mode, self.replica_rank = rollout_mode, replica_rank
        self.global_steps: int | None = None
        own = self.config
        self._length = own.max_model_len or own.prompt_length + own.response_length
        self._live: set[str] = set()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._rejects = False
        self._address: tuple[str, int] | None = None
        self._serving: asyncio.Task[None] | None = None

    async def launch_server(self, host: str | None = None) -> None:
        """Build the engine, and listen on a free port.

        Args:
            host: address to listen on; None is the node's, as Ray knows it.
        """
        ready, config = asyncio.Event(), ServeConfig(model=self.model_config.path)

        def build() -> tuple[Any, Any]:
            from rjax.build.engine_builder import build_engine  # imports JAX

            service = make_service(build_engine(self._engine_config()), config)
            self.engine = service.engine
            return service, build_app(service)

        async def serve() -> None:
            address = HostAddress(host or ray.util.get_node_ip_address().strip("[]"), 0)
            with address.bound() as listener:
                self._address = address.host, listener.getsockname()[1]
                await server.run_on(listener)

        server = Server(StartingApp(config), build, ready=ready.set)
        self._serving = asyncio.create_task(serve())
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([self._serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.is_set():
            await self._serving  # raises why the engine could not be built

    def _engine_config(self) -> EngineConfig:
        own = self.config
        options = {
            "model": self.model_config.local_path,
            "dtype": own.dtype,
            "max_model_len": self._length,
            "max_num_seqs": own.max_num_seqs,
            "max_num_batched_tokens": own.max_num_batched_tokens,
            "gpu_memory_utilization": own.gpu_memory_utilization,
            "tensor_parallel_size": own.tensor_model_parallel_size,
            "enable_prefix_caching": own.enable_prefix_caching,
            "logprobs_mode": own.logprobs_mode or "raw_logprobs",
            "load_format": own.load_format,
            "seed": self.replica_rank + own.seed,
            "use_tqdm": False,
            **(own.engine_kwargs.get("rjax") or {}),
        }
        return EngineConfig.from_options(options)

    def get_server_address(self) -> tuple[str, int]:
        """Host and port of the HTTP server."""
        assert self._address is not None, "launch_server has not been called"
        return self._address

    def get_rollout_config(self) -> Any:
        """verl's configuration of rollouts."""
        return self.config

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        *,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Sample an answer to a prompt, as verl's agent loops ask for one.

        After `abort_all_requests` it waits for `resume_generation` first, or gives an output with
        ``stop_reason`` "aborted" and no token.

        Args:
            prompt_ids: token ids of the prompt.
            sampling_params: fields of `rjax.SamplingParams`; ``logprobs`` is true or false.
            request_id: unique among unfinished requests.
            image_data, video_data, audio_data, mm_processor_kwargs: nothing; models take text only.
            priority: smaller runs earlier.

        Raises:
            ValueError: there is media, or the prompt leaves no room for an answer.
            EngineSleepingError: the engine sleeps.
        """
        if image_data or video_data or audio_data or mm_processor_kwargs:
            raise ValueError("the request has images, videos or audio; models take text only")
        params = self._params(len(prompt_ids), dict(sampling_params))
        while not self._is_open.is_set():
            if self._rejects:
                fields = {"global_steps": self.global_steps}
                return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=fields)
            await self._is_open.wait()
        last, steps = None, self.global_steps
        self._live.add(request_id)
        try:
            async for output in self.engine.generate(
                list(prompt_ids), params, request_id=request_id, priority=priority
            ):
                last = output
        finally:
            self._live.discard(request_id)
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
            extra_fields={"global_steps": steps, "num_cached_tokens": last.num_cached_tokens},
        )

    def _params(self, prompt_length: int, given: dict[str, Any]) -> SamplingParams:
        """Sampling parameters of rjax for those of verl."""
        own = self.config
        if prompt_length >= self._length:
            raise ValueError(
                f"the prompt has {prompt_length} tokens and max_model_len is {self._length}, which "
                "leaves no room for an answer; set max_model_len to more"
            )
        if given.get("prompt_logprobs") is not None:
            raise NotImplementedError(
                "the request asks for prompt_logprobs, which this rollout does not give to verl; "
                "let another rollout serve the teacher"
            )
        most = given.pop("max_tokens", given.pop("max_new_tokens", None))
        if most is None:
            most = min(own.response_length, own.prompt_length + own.response_length - prompt_length)
        given["max_tokens"] = max(1, min(most, self._length - prompt_length))
        given["logprobs"] = 0 if given.pop("logprobs", False) else None
        if given.get("top_k") == -1:
            given["top_k"] = 0
        given.setdefault("repetition_penalty", own.repetition_penalty)
        given.setdefault("ignore_eos", own.ignore_eos)
        if own.full_determinism:
            given.setdefault("seed", self.replica_rank + own.seed)
        return SamplingParams(**given, output_kind=RequestOutputKind.FINAL_ONLY)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take back device memory of the "weights", the "kv_cache", or by default both."""
        if self.rollout_mode is not RolloutMode.STANDALONE:
            await self.engine.lifecycle.wake_up(tags)

    async def sleep(self) -> None:
        """Give back the device memory, unless verl's ``free_cache_engine`` is false."""
        if self.config.free_cache_engine and self.rollout_mode is not RolloutMode.STANDALONE:
            await self.engine.lifecycle.sleep(2 if self.rollout_mode is RolloutMode.HYBRID else 1)

    async def release_kv_cache(self) -> None:
        """Give back the device memory of the KV pool; the weights stay."""
        if self.config.free_cache_engine and self.rollout_mode is not RolloutMode.COLOCATED:
            await self.engine.lifecycle.sleep(1)
            await self.engine.lifecycle.wake_up(["weights"])

    async def resume_kv_cache(self) -> None:
        """Take back the device memory of the KV pool."""
        if self.config.free_cache_engine and self.rollout_mode is not RolloutMode.COLOCATED:
            await self.engine.lifecycle.wake_up(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        """Clear the prefix cache. After new weights this is not needed: their KV has other keys."""
        await self.engine.call_utility("reset_prefix_cache")

    async def start_weight_update(self) -> None:
        """Begin an update, in place of one that a trainer has left."""
        await self.engine.weights.cancel()
        await self.engine.weights.start()

    async def add_weights(self, tensors: list[SentTensor]) -> None:
        """Add tensors to the update."""
        await self.engine.weights.add([(tensor.name, received(tensor)) for tensor in tensors])

    async def finish_weight_update(self, global_steps: int | None = None) -> None:
        """Use the new weights, once the requests under way have finished.

        Args:
            global_steps: the trainer's step, which later outputs have in ``extra_fields``.
        """
        await self.engine.weights.finish()
        self.global_steps = global_steps

    async def cancel_weight_update(self) -> None:
        """Drop an update; the old weights stay in use."""
        await self.engine.weights.cancel()

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the trainer's step of the weights."""
        self.global_steps = global_steps

    async def wait_for_requests_to_drain(self) -> None:
        """Wait until no request is under way."""
        while self.engine.num_live:
            await asyncio.sleep(_DRAIN_SECONDS)

    async def abort_all_requests(
        self, reset_prefix_cache: bool = True, reject_request: bool = False
    ) -> dict[str, Any]:
        """Abort the requests under way, with the tokens that they have, and accept no others
        until `resume_generation`.

        Args:
            reset_prefix_cache: clear the prefix cache too.
            reject_request: give later requests an aborted output; otherwise they wait.

        Returns:
            ``aborted_count`` and ``request_ids``.
        """
        self._is_open.clear()
        self._rejects = reject_request
        aborted = sorted(self._live)
        await self.engine.lifecycle.pause("abort")
        if reset_prefix_cache:
            await self.clear_kv_cache()
        return {"aborted_count": len(aborted), "request_ids": aborted}

    async def resume_generation(self) -> None:
        """Accept requests again."""
        await self.engine.lifecycle.resume()
        self._rejects = False
        self._is_open.set()

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """Abort one request, which returns the tokens that it has."""
        if request_id not in self._live:
            return {"aborted": False, "error": f"there is no request {request_id} under way"}
        await self.engine.abort([request_id])
        return {"aborted": True, "request_id": request_id}

    async def start_profile(self, **kwargs: Any) -> None:
        """verl's profilers are of torch.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "this rollout has no profiler of verl's; set actor_rollout_ref.rollout.profiler to null"
        )

    stop_profile = start_profile
