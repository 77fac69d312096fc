"""An engine without a model: answers each prompt with a text that the test gives."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from rjax.batch.compile_progress import CompileProgress
from rjax.batch.kernel_use import KernelUse
from rjax.engine.completion import Completion
from rjax.engine.protocol import Engine
from rjax.engine.stats import EngineStats
from rjax.errors import ContextLengthError, InvalidRequestError
from rjax.outputs import RequestMetrics, RequestOutput
from rjax.sampling import SamplingParams
from rjax.tokenization import Tokenizer


@dataclasses.dataclass
class Live:
    """A request on its way, and the tokens it will get."""

    prompt: str | None
    tokens: list[int]
    params: SamplingParams
    completions: list[Completion]
    answer: list[int]
    metrics: RequestMetrics
    given: int = 0


class FakeEngine(Engine):
    """One token for each live request a step; the last request finishes first where lengths allow.

    `answer` makes the text a prompt gets; the default repeats the prompt's last three tokens.
    It keeps no named prefixes.
    """

    tokenizer: Tokenizer | None = None

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        answer: Callable[[str], str] | None = None,
        max_model_len: int = 4096,
        vocab_size: int = 600,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.live: dict[str, Live] = {}
        self.seen: list[tuple[list[int], SamplingParams, str | None, int]] = []
        self.aborted: list[str] = []
        self.prefix: list[int] = []
        self.steps = 0
        self.fail_at_step: int | None = None
        self.failure: BaseException = RuntimeError("broken")
        self.cache_resets = 0
        self._answer = answer

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
    ) -> None:
        tokens = list(prompt_token_ids)
        if not tokens:
            raise InvalidRequestError("the prompt is empty")
        if len(tokens) >= self.max_model_len:
            raise ContextLengthError.of_tokens(len(tokens), self.max_model_len)
        if not all(0 <= token < self.vocab_size for token in tokens):
            raise InvalidRequestError("token id outside the model's vocabulary")
        params.check_model(self.vocab_size, 20)
        self.seen.append((tokens, params, prompt, priority))
        answer = tokens[-3:]
        if self._answer is not None and self.tokenizer is not None and prompt is not None:
            answer = self.tokenizer.encode(self._answer(prompt), add_special_tokens=False)
        limit = min(params.max_tokens or 10**6, len(answer))
        self.live[request_id] = Live(
            prompt,
            tokens,
            params,
            [
                Completion(
                    i,
                    params,
                    tokenizer=self.tokenizer,
                    eos_token_ids=frozenset(),
                    max_tokens=limit,
                    prompt_token_ids=tokens,
                )
                for i in range(params.n)
            ],
            answer,
            RequestMetrics(arrival_time=time.monotonic()),
        )

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        if self.steps == self.fail_at_step:
            raise self.failure
        outputs = []
        for request_id, live in reversed(list(self.live.items())):
            live.metrics.first_token_time = live.metrics.first_token_time or time.monotonic()
            for completion in live.completions:
                if not completion.finished:
                    completion.append(live.answer[live.given])
            live.given += 1
            live.metrics.num_generated_tokens = live.given
            if all(completion.finished for completion in live.completions):
                live.metrics.finished_time = time.monotonic()
                del self.live[request_id]
                outputs.append(self._output(request_id, live))
        return outputs

    def _output(self, request_id: str, live: Live) -> RequestOutput:
        shared = self.prefix == live.tokens[: len(self.prefix)]
        return RequestOutput(
            request_id,
            live.prompt,
            live.tokens,
            outputs=[c.snapshot(live.params.output_kind) for c in live.completions],
            finished=True,
            metrics=live.metrics,
            num_cached_tokens=len(self.prefix) if shared else 0,
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def abort_request(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.live.pop(request_id, None)

    def set_shared_prefix(self, token_ids: Sequence[int]) -> None:
        self.prefix = list(token_ids)

    def reset_prefix_cache(self) -> None:
        self.cache_resets += 1

    def kernels(self) -> list[KernelUse]:
        return []

    def compile_progress(self) -> CompileProgress:
        return CompileProgress(compiled=0, total=0)

    def startup_seconds(self) -> dict[str, float]:
        return {"weights": 0.25, "pool": 1.5}

    def stats(self) -> EngineStats:
        return EngineStats(
            backend="fake",
            device="none",
            max_num_seqs=2,
            steps=self.steps,
            kv_tokens_read=10,
            kv_tokens_unshared=30,
            peak_kv_bytes=2**20,
            peak_kv_bytes_unshared=3 * 2**20,
        )
