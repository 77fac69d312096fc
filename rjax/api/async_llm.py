"""AsyncLLM: offline inference for asyncio programs."""

import asyncio
import concurrent.futures
import dataclasses
import math
import pathlib
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

import numpy as np
from jaxtyping import Float32

from rjax.api.async_engine import AsyncLLMEngine, QueueLimits
from rjax.api.async_weight_updates import UpdatesWeightsAsync
from rjax.api.prefixed_prompts import PrefixedPrompts
from rjax.api.prompts import Prompt, encode_conversations, raise_first_refusal
from rjax.api.request_runner import NewRequest, default_sampling_params
from rjax.api.scoring import per_token_logps, score_requests
from rjax.closing import Closable
from rjax.config import EngineConfig, RelaySettings
from rjax.engine.arg_utils import EngineArgs
from rjax.engine.protocol import Engine, RunningMode
from rjax.engine_channel.channel import EngineChannel, RemotePrefixEngine
from rjax.engine_channel.process_channel import ProcessChannel
from rjax.engine_channel.thread_channel import ThreadChannel
from rjax.errors import EngineClosedError, InvalidRequestError
from rjax.outputs import RequestOutput
from rjax.sampling import SamplingParams
from rjax.vllm.names import (
    ARGUMENTS,
    ENGINE_ARGUMENTS,
    RESET_ARGUMENTS,
    missing_attribute,
    refuse_arguments,
)

_NO_LIMITS = QueueLimits(
    sequences=sys.maxsize,
    prompt_tokens=sys.maxsize,
    heartbeat_seconds=math.inf,
    unread_tokens=sys.maxsize,
)
_STOP_SECONDS = 60.0
_FACTORY = "rjax.build.engine_builder:build_engine_from_options"


class AsyncLLM(UpdatesWeightsAsync):
    """A model with an asyncio interface; requests of all tasks are batched together::

        async with AsyncLLM("Qwen/Qwen3-0.6B") as llm:
            async for output in llm.generate("Why is the sky blue?", SamplingParams(max_tokens=64)):
                print(output.outputs[0].text)

    The engine runs on its own thread, which starts with the first request. Call all methods except
    the constructor from the event loop of that request. With ``engine_process`` it runs in a
    process of its own, so that work of this process does not slow it down; a script then needs no
    ``if __name__ == "__main__"``.

    `close`, `shutdown` and the end of ``async with`` free the device memory.

    Args:
        model: a Hugging Face folder or hub id; None for the bundled model.
        engine_process: run the engine in a process of its own.
        options: options of `rjax.LLM`.

    Raises:
        InvalidConfigError: an unknown option or a value out of range.
    """

    def __init__(
        self, model: str | None = None, *, engine_process: bool = False, **options: Any
    ) -> None:
        config = EngineConfig.from_options({"model": model, **options})
        if engine_process:
            channel = ProcessChannel(_FACTORY, config.to_options())
            try:
                channel.wait_ready()
                self._start(channel, config.relay, None, owned=None)
            except BaseException:
                channel.end()
                channel.join(_STOP_SECONDS)
                raise
            return
        from rjax.build.engine_builder import build_engine  # imports JAX

        engine = build_engine(config)
        self._start(ThreadChannel(engine), config.relay, None, owned=engine)

    @classmethod
    def from_engine(
        cls,
        engine: Engine,
        relay: RelaySettings | None = None,
        limits: QueueLimits | None = None,
    ) -> "AsyncLLM":
        """An AsyncLLM over an existing engine. Nothing else may step the engine, and closing the
        AsyncLLM does not close it. Without ``limits`` the queue is unbounded."""
        llm = cls.__new__(cls)
        llm._start(ThreadChannel(engine), relay or RelaySettings(), limits, owned=None)
        return llm

    def _start(
        self,
        channel: EngineChannel,
        relay: RelaySettings,
        limits: QueueLimits | None,
        *,
        owned: Closable | None,
    ) -> None:
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owned = owned
        self._engine = channel.engine if isinstance(channel, ThreadChannel) else None
        self._served = AsyncLLMEngine(channel, limits or _NO_LIMITS)
        prefixes = self._engine or RemotePrefixEngine(channel)
        self._prompts = PrefixedPrompts(prefixes, relay.sys_schema)
        # A single thread keeps prompts in the order of the calls.
        self._texts = concurrent.futures.ThreadPoolExecutor(1, "rjax-texts")
        if relay.sys_prompt is not None:
            self._prompts.fill(relay.sys_prompt)

    def __repr__(self) -> str:
        if self._closed:
            return "AsyncLLM(closed)"
        if self._engine is None:
            return f"AsyncLLM({self._served.channel.facts.description} in a process)"
        return f"AsyncLLM({self._engine!r})"

    if not TYPE_CHECKING:  # type checkers report what is missing themselves

        def __getattr__(self, name: str) -> Never:
            raise missing_attribute(self, name)

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, usage_context: object = None, **vllm: Any
    ) -> "AsyncLLM":
        """An AsyncLLM with these options. ``usage_context`` has no effect: no usage is reported.

        Raises:
            InvalidRequestError: another argument of vLLM asks for something.
        """
        refuse_arguments("AsyncLLM.from_engine_args", vllm, ENGINE_ARGUMENTS)
        return cls(**dataclasses.asdict(engine_args))

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        prefix: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
        **vllm: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Complete one prompt and yield its outputs; the last one has ``finished`` set.

        ``sampling_params.output_kind`` says what each output holds: everything so far (CUMULATIVE,
        the default), the new part (DELTA), or everything in one output at the end (FINAL_ONLY).
        Outputs are merged if the reader falls behind. Closing the generator, or cancelling the task
        that reads it, aborts the request.

        Args:
            prompt: a text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``.
            sampling_params: None takes the model's defaults.
            request_id: id for `abort`; unique among unfinished requests. None generates one.
            priority, prefix, cache_salt, timeout, vllm: see `LLM.generate`.

        Raises:
            InvalidRequestError: the prompt cannot be served.
            EngineDeadError: the engine stopped on an error.
            EngineClosedError: this AsyncLLM is or was closed.
        """
        refuse_arguments("AsyncLLM.generate", vllm, ARGUMENTS)
        await self._ensure_started()
        encode = self._prompts.encode
        if prefix is None:
            found = await self._on_thread(lambda: encode([prompt]))
        else:  # only the engine's thread may look up a prefix by name
            found = await self._with_prefixes(lambda: encode([prompt], prefix))
            if cache_salt is None:
                salt = self._prompts.salt
                cache_salt = await self._with_prefixes(lambda: salt(prefix))
        given = {"priority": priority, "cache_salt": cache_salt, "timeout": timeout}
        async for output in self._outputs(found, sampling_params, request_id, given):
            yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer one conversation; yields outputs as `generate` does. ``template`` takes the
        arguments of `LLM.chat` from ``chat_template`` on."""
        await self._ensure_started()
        tokenizer = self._prompts.tokenizer
        found = await self._on_thread(
            lambda: encode_conversations(tokenizer, [messages], **template)
        )
        given = {"priority": priority, "timeout": timeout}
        async for output in self._outputs(found, sampling_params, request_id, given):
            yield output

    async def get_per_token_logps(
        self, prompts: Any, completions: Any, *, temperature: float = 1.0
    ) -> list[Float32[np.ndarray, " T"]]:
        """The log-probability of each token of each completion, as `LLM.get_per_token_logps`.
        Cancelling the task, or an error of one pair, aborts all of them."""
        await self._ensure_started()
        requests = await self._on_thread(
            lambda: score_requests(prompts, completions, self._prompts, temperature=temperature)
        )

        async def run(i: int, request: NewRequest) -> Float32[np.ndarray, " T"]:
            outputs = self._outputs([request.prompt], request.params, None, dict(request.options))
            try:
                (output,) = [output async for output in outputs]
            except InvalidRequestError as error:
                raise type(error)(f"prompts[{i}]: {error}") from error
            return per_token_logps(request, output)

        tasks = [asyncio.ensure_future(run(*pair)) for pair in enumerate(requests)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests; each gets a last output with ``finish_reason`` "abort". Unknown ids are
        ignored, because a request may finish before its abort arrives."""
        self._check_open()
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        if self._loop is not None:
            await self._ensure_started()
            await self._served.abort(names)

    async def call[T](self, function: Callable[[Engine], T]) -> T:
        """Run ``function(engine)`` on the engine's thread between two steps, for example to read
        ``stats``; an exception of the function is raised here.

        Raises:
            RuntimeError: the engine runs in a process of its own.
        """
        await self._ensure_started()
        return await self._served.call(function)

    async def fill_prefix_kv_cache(self, shared_prefix: str | Sequence[int] | None) -> None:
        """Replace the shared prefix, as `LLM.fill_prefix_kv_cache`. Blocks other requests."""
        await self._with_prefixes(lambda: self._prompts.fill(shared_prefix))

    async def add_prefix(
        self, name: str, prefix: str | Sequence[int], *, cache_salt: str | None = None
    ) -> None:
        """Pin the KV of a prefix under a name, as `LLM.add_prefix`. Blocks other requests."""
        await self._with_prefixes(lambda: self._prompts.add(name, prefix, cache_salt))

    async def drop_prefix(self, name: str) -> None:
        """Unpin a named prefix, as `LLM.drop_prefix`."""
        await self._with_prefixes(lambda: self._prompts.drop(name))

    async def prefixes(self) -> list[str]:
        """Names of the pinned prefixes."""
        return await self._with_prefixes(self._prompts.names)

    async def save_prefix(self, name: str, path: str | pathlib.Path) -> None:
        """Write a named prefix with its KV to a file, as `LLM.save_prefix`."""
        await self._with_prefixes(lambda: self._prompts.save(name, path))

    async def load_prefix(
        self, path: str | pathlib.Path, name: str | None = None, *, cache_salt: str | None = None
    ) -> str:
        """Pin a prefix that `save_prefix` wrote, as `LLM.load_prefix`."""
        return await self._with_prefixes(lambda: self._prompts.load(path, name, cache_salt))

    async def reset_prefix_cache(self, **vllm: Any) -> None:
        """Clear the prefix cache; pinned prefixes stay."""
        refuse_arguments("AsyncLLM.reset_prefix_cache", vllm, RESET_ARGUMENTS)
        await self._ensure_started()
        await self._served.call_utility("reset_prefix_cache")

    async def pause(self, mode: RunningMode = "abort") -> None:
        """Schedule no new requests until `resume`; see `LLM.pause`. Requests queue meanwhile."""
        await self._ensure_started()
        await self._served.lifecycle.pause(mode)

    async def resume(self) -> None:
        """End a pause."""
        await self._ensure_started()
        await self._served.lifecycle.resume()

    async def pause_generation(
        self, *, mode: RunningMode = "abort", clear_cache: bool = False
    ) -> None:
        """`pause` under vLLM's name. ``clear_cache`` clears the prefix cache too; new weights need
        no clearing, since KV of other weights is never used."""
        await self.pause(mode)
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """`resume` under vLLM's name."""
        await self.resume()

    async def is_paused(self) -> bool:
        """Whether the engine is paused, or sleeps."""
        await self._ensure_started()
        return await self._served.lifecycle.is_paused()

    async def sleep(self, level: int = 1, mode: RunningMode = "abort") -> None:
        """Give back the memory of the KV pool and of the weights, as `LLM.sleep`."""
        await self._ensure_started()
        await self._served.lifecycle.sleep(level, mode)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the memory again, as `LLM.wake_up`."""
        await self._ensure_started()
        await self._served.lifecycle.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """Whether some memory is given back."""
        await self._ensure_started()
        return await self._served.lifecycle.is_sleeping()

    async def stats(self) -> Any:
        """The engine's counters and memory figures."""
        await self._ensure_started()
        return await self._served.call_utility("stats")

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer, as `LLM.get_tokenizer`."""
        self._check_open()
        return self._prompts.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's default parameters, or `SamplingParams()` if it has none."""
        self._check_open()
        return default_sampling_params(self._served.channel.tokenizer)

    async def close(self) -> None:
        """Abort unfinished requests, end the thread and free the memory. Any later use raises
        EngineClosedError; closing twice does nothing."""
        if self._begin_closing():
            await asyncio.to_thread(self._end)

    def shutdown(self, timeout: float | None = None) -> None:
        """`close` without an event loop; blocks until the current step has ended, for at most
        ``timeout`` seconds, by default a minute.

        Raises:
            RuntimeError: the step takes longer; the memory is not freed.
        """
        if self._begin_closing():
            self._end(_STOP_SECONDS if timeout is None else timeout)

    async def __aenter__(self) -> "AsyncLLM":
        await self._ensure_started()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._served.channel.end()
            self._texts.shutdown(wait=False)

    async def _outputs(
        self,
        found: "list[Prompt | Any]",
        given: SamplingParams | None,
        request_id: str | None,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput]:
        raise_first_refusal(found)
        (prompt,) = found
        assert isinstance(prompt, Prompt)
        assert prompt.token_ids is not None
        params = self.get_default_sampling_params() if given is None else given
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params is {type(params).__name__}; give SamplingParams"
            )
        self._check_open()
        stream = await self._served.submit(
            prompt.token_ids,
            params.clone(),
            request_id=request_id,
            prompt=prompt.text,
            **{name: value for name, value in options.items() if value is not None},
        )
        async with stream:
            async for output in stream:
                yield output

    async def _with_prefixes[T](self, function: Callable[[], T]) -> T:
        """Run a function of `PrefixedPrompts` that calls the engine."""
        await self._ensure_started()
        if self._engine is None:
            return await self._on_thread(function)
        return await self._served.call(lambda engine: function())

    async def _on_thread[T](self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._texts, function)

    async def _ensure_started(self) -> None:
        self._check_open()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            await self._served.start()
        elif self._loop is not loop:
            raise RuntimeError(
                "this AsyncLLM was first used in another event loop; use it in that one only"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("this AsyncLLM is closed; make a new one")

    def _begin_closing(self) -> bool:
        if self._closed:
            return False
        self._closed = True
        self._served.fail_all(EngineClosedError("this AsyncLLM was closed; make a new one"))
        return True

    def _end(self, seconds: float = _STOP_SECONDS) -> None:
        self._served.channel.end()
        self._texts.shutdown()
        if not self._served.channel.join(seconds):
            raise RuntimeError(f"the engine's step took over {seconds:g} seconds; not freed")
        if self._owned is not None:
            self._owned.close()
