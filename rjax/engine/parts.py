"""What an engine is made from."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rjax.batch.step_limits import StepLimits
from rjax.config import EngineConfig
from rjax.engine.request_stats import RequestStats
from rjax.engine.startup_times import StartupTimes
from rjax.engine.stats import EngineStats
from rjax.models import ModelConfig
from rjax.tokenization import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The worker and the limits of an engine; tests and benchmarks pass a worker of their own.

    Attributes:
        config: the engine's options, as the caller gave them.
        worker: runs the steps.
        vocab_size: width of the logits.
        max_model_len: tokens of the longest sequence.
        limits: limits of a step.
        identity: first key of every chain of the prefix cache: configuration, weights and dtypes,
            but not where they are stored.
        backend, device: names for the statistics.
        tokenizer: None if the engine serves token ids only.
        model_config: None without a model.
        startup_times: seconds of the phases before the engine is made.
        summary: facts for the commands to show, by name.
    """

    config: EngineConfig
    worker: Any  # a StepWorker; a structural check at run time would call its properties
    vocab_size: int
    max_model_len: int
    limits: StepLimits
    identity: bytes
    backend: str = "none"
    device: str = "none"
    tokenizer: Tokenizer | None = None
    model_config: ModelConfig | None = None
    startup_times: StartupTimes = dataclasses.field(default_factory=StartupTimes)
    summary: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def new_stats(self) -> EngineStats:
        """The statistics of an engine that has done nothing."""
        return EngineStats(
            self.backend,
            self.device,
            max_num_seqs=self.limits.max_num_seqs,
            num_decode_steps=self.worker.num_decode_steps,
            page_bytes=self.worker.pool.page_bytes,
            requests=RequestStats(self.max_model_len),
        )
