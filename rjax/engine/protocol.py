"""What `rjax.LLM`, `rjax.AsyncLLM` and the server use of an engine."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

from rjax.batch.compile_progress import CompileProgress
from rjax.batch.kernel_use import KernelUse
from rjax.batch.token_mask import TokenMask
from rjax.engine.named_prefixes.protocol import PrefixEngine
from rjax.outputs import RequestOutput
from rjax.sampling import SamplingParams
from rjax.structured.mask_request import MaskRequest


@runtime_checkable
class Engine(PrefixEngine, Protocol):
    """An engine; `rjax.engine.llm_engine.LLMEngine` is one, tests have others.

    Attributes:
        summary: model, dtype, sizes and kernels, by name, for the commands to show.
    """

    summary: dict[str, str]

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request; raises InvalidRequestError for one that cannot be served."""
        ...

    def structured_masks(
        self, params: SamplingParams, wanted: MaskRequest | None = None
    ) -> Sequence[TokenMask]:
        """The masks of a constraint, by default ``params.structured_outputs``, one per sample; any
        thread may call this."""
        ...

    def limit_grammar_cache(
        self, size: int, num_bytes: float, total_bytes: float, idle_seconds: float
    ) -> None:
        """Bound the memory of compiled constraints; see
        `rjax.structured.compiler.GrammarCompiler.limit_cache`."""
        ...

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests with new output."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Whether another step has work to do."""
        ...

    def abort_request(self, request_id: str) -> None:
        """End a request and free what it holds."""
        ...

    def stop_samples(self, request_id: str, samples: Collection[int]) -> None:
        """End samples of a request, in whose text a stop string was found. Unknown and finished
        ones are ignored."""
        ...

    def reset_prefix_cache(self) -> Any:
        """Forget the KV of finished requests; pinned prefixes stay."""
        ...

    def kernels(self) -> list[KernelUse]:
        """The kernel of each operation at each step size, and why not a faster one."""
        ...

    def compile_progress(self) -> CompileProgress:
        """How far the compilation of the step sizes is; any thread may call this."""
        ...

    def startup_seconds(self) -> dict[str, float]:
        """Seconds of each phase of the start; any thread may call this."""
        ...

    def stats(self) -> Any:
        """Counters and memory figures."""
        ...
