"""Offline inference: a model in this process, lists of prompts in, lists of outputs out."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

from rjax.api.beam_search import BeamSearchOutput, BeamSearchParams, run_beam_search
from rjax.api.output_stream import OutputStream
from rjax.api.pausable_llm import PausableLLM
from rjax.api.prefixed_prompts import PrefixedPrompts
from rjax.api.progress import Progress
from rjax.api.prompts import Prompt, encode_conversations, raise_first_refusal, split_prompts
from rjax.api.request_runner import (
    NewRequest,
    RequestRunner,
    default_sampling_params,
    new_requests,
    params_per_prompt,
    priorities_of,
)
from rjax.api.scoring import Scoring
from rjax.api.weight_updates import UpdatesWeights
from rjax.batch.kernel_use import KernelUse
from rjax.closing import Closable, SynchronizedClosable, synchronized
from rjax.config import DType, EngineConfig, RelayMode, RelaySettings
from rjax.config.option_docs import with_engine_options
from rjax.engine.arg_utils import EngineArgs
from rjax.engine.protocol import Engine
from rjax.outputs import RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.tokenization.sys_prompt_tokenizer import DEFAULT_SCHEMA
from rjax.vllm.names import ARGUMENTS, RESET_ARGUMENTS, missing_attribute, refuse_arguments


@with_engine_options
class LLM(Scoring, UpdatesWeights, PausableLLM):
    """A model ready to generate.

    Calls from several threads run one after the other. Requests of `stream` also advance in the
    steps of other calls. For asyncio there is `rjax.AsyncLLM`.

    The device memory is freed by `close`, at the end of ``with LLM(...) as llm:``, or when the last
    reference is deleted.

    Args:
        {options}

    Raises:
        InvalidConfigError: an unknown option or a value out of range.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        tokenizer: Any = None,
        dtype: DType = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.92,
        enable_relay_attention: RelayMode | bool = "auto",
        sys_prompt: str | None = None,
        sys_schema: str = DEFAULT_SCHEMA,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_options(
            {
                "model": model,
                "tokenizer": tokenizer,
                "dtype": dtype,
                "seed": seed,
                "max_model_len": max_model_len,
                "gpu_memory_utilization": gpu_memory_utilization,
                "enable_relay_attention": enable_relay_attention,
                "sys_prompt": sys_prompt,
                "sys_schema": sys_schema,
                **options,
            }
        )
        from rjax.build.engine_builder import build_engine  # brings in JAX: only once it is needed

        engine = build_engine(config)
        self._start(engine, config.relay, owned=engine)

    @classmethod
    def from_engine(cls, engine: Engine, relay: RelaySettings | None = None) -> "LLM":
        """An LLM that uses an existing engine. Nothing else may step the engine meanwhile; closing
        the LLM does not close the engine."""
        llm = cls.__new__(cls)
        llm._start(engine, relay or RelaySettings(), owned=None)
        return llm

    def _start(self, engine: Engine, relay: RelaySettings, *, owned: Closable | None) -> None:
        SynchronizedClosable.__init__(self)
        self.engine = engine
        self._owned = owned
        self._prompts = PrefixedPrompts(engine, relay.sys_schema)
        self._runner = RequestRunner(engine)
        if relay.sys_prompt is not None:
            self.fill_prefix_kv_cache(relay.sys_prompt)

    def __repr__(self) -> str:
        return "LLM(closed)" if self._closed else f"LLM({self.engine!r})"

    if not TYPE_CHECKING:  # type checkers report what is missing themselves

        def __getattr__(self, name: str) -> Never:
            raise missing_attribute(self, name)

    @property
    def llm_engine(self) -> Engine:
        """The engine, under vLLM's name; its attributes are those of `rjax.engine`."""
        return self.engine

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        """An LLM with these options."""
        return cls(**dataclasses.asdict(engine_args))

    def _free(self) -> None:
        self._runner.close()
        if self._owned is not None:
            self._owned.close()

    @synchronized
    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        prefix: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
        **vllm: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt.

        Args:
            prompts: one prompt or a list of them; a prompt is a text, a list of token ids,
                ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``.
            sampling_params: parameters for all prompts, or a list with one for each; None takes the
                model's defaults.
            use_tqdm: show a progress bar, on a terminal or in a notebook; a callable is used in
                tqdm's place.
            priority: one for all prompts, or one per prompt; lower runs earlier.
            prefix: name of a prefix (`add_prefix`) to put in front of every prompt, instead of a
                configured system prompt.
            cache_salt: KV is shared only with requests of the same salt, up to 128 characters.
            timeout: seconds after which unfinished requests end with ``finish_reason`` "abort". A
                request with ``best_of`` is aborted as a whole, with all of its outputs.
            vllm: arguments of vLLM that are not supported, such as ``lora_request``, if they are
                None.

        Returns:
            One output per prompt, in the order of the prompts. If one of several prompts cannot be
            served, its output has the reason in ``.error`` and an ``outputs[0]`` with
            ``finish_reason`` "error"; the others are not affected.

        Raises:
            InvalidRequestError: the only prompt cannot be served, or the arguments contradict each
                other.
        """
        refuse_arguments("LLM.generate", vllm, ARGUMENTS)
        whole = RequestOutputKind.FINAL_ONLY
        requests = self._requests(
            prompts, sampling_params, whole, priority, prefix, cache_salt, timeout
        )
        return self._runner.run(requests, use_tqdm)

    @synchronized
    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        prefix: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> OutputStream:
        """Complete each prompt and yield the tokens as they are generated::

            for output in llm.stream("Why is the sky blue?", SamplingParams(max_tokens=64)):
                print(output.outputs[0].text, end="", flush=True)

        Arguments are as in `generate`. If one of several prompts cannot be served, it has one
        output, with the reason in ``.error``.

        Returns:
            An iterator of increments (``RequestOutputKind.DELTA``), in the order in which they are
            ready; ``prompt_index`` is the index of the prompt. Leaving the loop aborts the requests
            that still run; see `OutputStream`, also for threads.

        Raises:
            InvalidRequestError: as `generate`; also if ``output_kind`` is FINAL_ONLY, or if
                ``best_of`` is above ``n``.
        """
        news = RequestOutputKind.DELTA
        requests = self._requests(
            prompts, sampling_params, news, priority, prefix, cache_salt, timeout
        )
        return OutputStream(self, self._runner, self._runner.open_stream(requests))

    @synchronized
    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **vllm: Any,
    ) -> list[RequestOutput]:
        """Answer each conversation, formatted by the tokenizer's chat template.

        Args:
            messages: one conversation, a list of ``{"role": ..., "content": ...}``, or a list of
                conversations.
            chat_template: Jinja source that replaces the tokenizer's template; trust it like code.
            add_generation_prompt: end the prompt with the start of the assistant's message.
            continue_final_message: leave the last message open, so that the model continues it.
            tools: JSON descriptions of functions, for templates that use them.
            chat_template_kwargs: more variables for the template.

        The other arguments, the order of the outputs and the errors are as in `generate`.
        """
        refuse_arguments("LLM.chat", vllm, ARGUMENTS)
        found = encode_conversations(
            self._prompts.tokenizer,
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        every = self._params(sampling_params, len(found), RequestOutputKind.FINAL_ONLY)
        return self._runner.run(new_requests(found, every, priority), use_tqdm)

    @synchronized
    def stream_chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        **template: Any,
    ) -> OutputStream:
        """`chat` as a stream, see `stream`; ``template`` takes the arguments of `chat` from
        ``chat_template`` on."""
        found = encode_conversations(self._prompts.tokenizer, messages, **template)
        every = self._params(sampling_params, len(found), RequestOutputKind.DELTA)
        requests = new_requests(found, every, priority)
        return OutputStream(self, self._runner, self._runner.open_stream(requests))

    @synchronized
    def fill_prefix_kv_cache(self, shared_prefix: str | Sequence[int] | None) -> None:
        """Replace the shared prefix; nothing is recompiled.

        Args:
            shared_prefix: a text becomes the system prompt of all later text prompts, formatted by
                ``sys_schema``. For token ids the KV is computed and pinned; prompts of token ids
                that start with them are served from it. None removes the system prompt.
        """
        self._prompts.fill(shared_prefix)

    @synchronized
    def add_prefix(
        self, name: str, prefix: str | Sequence[int], *, cache_salt: str | None = None
    ) -> None:
        """Compute the KV of a prefix and pin it under a name; any number of prefixes can exist.

        Args:
            name: name for ``generate(..., prefix=name)``; a name in use gets the new prefix.
                Prompts that start with the same tokens are served from it without naming it.
            prefix: a text, which ``sys_schema`` puts in front of the prompt's text and which is
                tokenised together with it; or token ids, which are put in front of the prompt's.
            cache_salt: only requests with the same salt are served from it.

        Raises:
            InvalidRequestError, InvalidConfigError, OutOfMemoryError, EngineSleepingError,
                EnginePausedError: see the engine's `add_prefix`.
        """
        self._prompts.add(name, prefix, cache_salt)

    @synchronized
    def drop_prefix(self, name: str) -> None:
        """Unpin a named prefix.

        Raises:
            InvalidRequestError: there is no prefix of this name.
        """
        self._prompts.drop(name)

    @synchronized
    def prefixes(self) -> list[str]:
        """Names of the pinned prefixes."""
        return self._prompts.names()

    @synchronized
    def save_prefix(self, name: str, path: str | pathlib.Path) -> None:
        """Write a named prefix with its KV to a safetensors file, for `load_prefix` or the
        option ``prefix_files`` of a later start.

        Raises:
            InvalidRequestError: there is no prefix of this name, or the file cannot be written.
        """
        self._prompts.save(name, path)

    @synchronized
    def load_prefix(
        self, path: str | pathlib.Path, name: str | None = None, *, cache_salt: str | None = None
    ) -> str:
        """Pin a prefix that `save_prefix` wrote; nothing is computed.

        Args:
            path: path of the file.
            name: name of the prefix, see `add_prefix`; None for the name in the file.
            cache_salt: see `add_prefix`.

        Returns:
            The name of the prefix.

        Raises:
            InvalidConfigError: the file is no prefix, or belongs to another model, dtype or page
                size.
            InvalidRequestError, OutOfMemoryError: see the engine's `add_prefix`.
        """
        return self._prompts.load(path, name, cache_salt)

    @synchronized
    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        priority: int | Sequence[int] | None = None,
        **vllm: Any,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt, best first, by beam search.

        Args:
            prompts: prompts as in `generate`; a configured system prompt is put in front of texts.
            params: parameters of the search.
            use_tqdm, priority, vllm: see `generate`.

        Raises:
            InvalidRequestError: a prompt cannot be served, or the parameters exceed the engine's
                limits.
        """
        refuse_arguments("LLM.beam_search", vllm, ARGUMENTS)
        found = self._prompts.encode(split_prompts(prompts))
        raise_first_refusal(found)
        rows = []
        for prompt in found:
            assert isinstance(prompt, Prompt) and prompt.token_ids is not None
            rows.append(prompt.token_ids)
        name, step = f"beams{self._runner.new_id()}", self._runner.step
        progress = Progress(use_tqdm, len(rows))
        try:
            outputs = run_beam_search(
                self.engine,
                rows,
                params or BeamSearchParams(),
                name,
                step,
                priorities=priorities_of(priority, len(rows)),
                progress=progress,
            )
        finally:
            progress.close()
        for prompt, output in zip(found, outputs, strict=True):
            assert isinstance(prompt, Prompt)
            output.prompt = prompt.text
        return outputs

    def get_tokenizer(self) -> Any:
        """The ``transformers`` tokenizer. If the LLM was given a tokenizer object, it is that
        object.

        Raises:
            InvalidRequestError: the engine serves token ids only.
        """
        self._check_open()
        return self._prompts.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's own defaults, or `SamplingParams()` if it has none."""
        self._check_open()
        return default_sampling_params(self.engine.tokenizer)

    @synchronized
    def reset_prefix_cache(self, **vllm: Any) -> None:
        """Evict the KV of finished requests; pinned prefixes stay."""
        refuse_arguments("LLM.reset_prefix_cache", vllm, RESET_ARGUMENTS)
        self.engine.reset_prefix_cache()

    @synchronized
    def kernels(self) -> list[KernelUse]:
        """The kernel of each operation at each step size, and why not a faster one.

        Where no kernel does an operation as a whole, such as a decoder layer or a norm with the
        projection after it, ``kernel`` is None and ``refused`` has the reasons; the operations that
        it consists of are listed too.
        """
        return self.engine.kernels()

    @synchronized
    def stats(self) -> Any:
        """The engine's counters and memory figures."""
        return self.engine.stats()

    def _params(self, given: Any, count: int, kind: RequestOutputKind) -> list[SamplingParams]:
        return params_per_prompt(given, count, self.get_default_sampling_params, kind)

    def _requests(
        self,
        prompts: Any,
        sampling_params: Any,
        kind: RequestOutputKind,
        priority: int | Sequence[int] | None,
        prefix: str | None,
        cache_salt: str | None,
        timeout: float | None,
    ) -> list[NewRequest]:
        found = self._prompts.encode(split_prompts(prompts), prefix)
        if prefix is not None and cache_salt is None:
            cache_salt = self._prompts.salt(prefix)
        every = self._params(sampling_params, len(found), kind)
        return new_requests(found, every, priority, cache_salt=cache_salt, timeout=timeout)
