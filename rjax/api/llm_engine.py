"""LLMEngine: requests that are added one by one and computed step by step, as vLLM's class."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from rjax.api.llm import LLM
from rjax.api.prompts import Prompt, raise_first_refusal
from rjax.closing import synchronized
from rjax.engine.arg_utils import EngineArgs
from rjax.errors import InvalidRequestError
from rjax.inputs import PromptType
from rjax.outputs import RequestOutput
from rjax.sampling import SamplingParams
from rjax.vllm.names import ARGUMENTS, ENGINE_ARGUMENTS, refuse_arguments


class LLMEngine(LLM):
    """An `LLM` whose steps the caller runs::

        engine = LLMEngine.from_engine_args(EngineArgs(model="Qwen/Qwen3-0.6B"))
        engine.add_request("a", "Why is the sky blue?", SamplingParams(max_tokens=64))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.request_id, output.outputs[0].text)

    `LLM.generate` does all of this for a list of prompts.
    """

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, usage_context: object = None, **vllm: Any
    ) -> "LLMEngine":
        """An engine with these options. ``usage_context`` has no effect: no usage is reported.

        Raises:
            InvalidRequestError: another argument of vLLM asks for something.
        """
        refuse_arguments("LLMEngine.from_engine_args", vllm, ENGINE_ARGUMENTS)
        return cls(**dataclasses.asdict(engine_args))

    @synchronized
    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        **vllm: Any,
    ) -> None:
        """Add a request; later calls of `step` compute it.

        Args:
            request_id: an id that no unfinished request has.
            prompt: one prompt, in a form of `LLM.generate`.
            params: how to sample. Its ``output_kind`` says what the outputs hold: by default all
                tokens so far.
            priority: priority of the request; lower runs earlier.
            cache_salt: see `LLM.generate`.
            arrival_time: has no effect; a request arrives when it is added.
            vllm: see `LLM.generate`.

        Raises:
            InvalidRequestError: the request cannot be served, or its id is in use.
        """
        refuse_arguments("LLMEngine.add_request", vllm, ARGUMENTS)
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params is {type(params).__name__}; give SamplingParams")
        (found,) = encoded = self._prompts.encode([prompt])
        raise_first_refusal(encoded)
        assert isinstance(found, Prompt) and found.token_ids is not None
        self.engine.add_request(
            request_id,
            found.token_ids,
            params.clone(),
            prompt=found.text,
            priority=priority,
            cache_salt=cache_salt,
        )

    @synchronized
    def step(self) -> list[RequestOutput]:
        """Run one step. Return an output for each request that has new tokens or is finished."""
        return self._runner.step()

    @synchronized
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work to do."""
        return self.engine.has_unfinished_requests()

    @synchronized
    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests and free what they hold; unknown and finished ones are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            self.engine.abort_request(name)
