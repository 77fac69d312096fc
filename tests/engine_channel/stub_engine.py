"""An engine without a model, for both channels; prompts say what goes wrong, files what it does."""

import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

from rjax.batch.compile_progress import CompileProgress
from rjax.config import EngineConfig
from rjax.engine.protocol import Engine, NamedPrefix
from rjax.engine.request_stats import RequestStats
from rjax.engine.stats import EngineStats
from rjax.errors import (
    GrammarFailedError,
    InvalidConfigError,
    InvalidRequestError,
    InvalidWeightsError,
    OutOfMemoryError,
    OverloadedError,
)
from rjax.models import CheckpointError
from rjax.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestMetrics, RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams

REFUSED, CRASH_OF_ADD, CRASH_OF_STEP, GRAMMAR, OVERLOADED, LOGPROBS, NONSENSE = range(13, 20)


class StubEngine(Engine):
    """Gives each request the tokens 0, 1, 2, ... one a step, as DELTA or CUMULATIVE outputs.

    Args:
        folder: ``gate`` in it holds steps up, ``compiling`` says that a step waits for a program,
            ``log`` gets a line for each request, and ``steps`` says how many there were.
        start: "config", "memory", "checkpoint" or "file" refuses to start, "crash" fails, "slow"
            takes a minute, "nonsense" writes what is no message.
        step_seconds: of a step.
    """

    tokenizer = None

    model_config = types.SimpleNamespace(vocab_size=100)

    def __init__(self, folder: str, start: str = "", step_seconds: float = 0.0) -> None:
        if start == "config":
            raise InvalidConfigError("page_size is 3; choose another")
        if start == "memory":
            raise OutOfMemoryError("the weights do not fit")
        if start == "checkpoint":
            raise CheckpointError("no config.json in a")
        if start == "file":
            Path("/nowhere").read_bytes()
        if start == "crash":
            raise ZeroDivisionError("at the start")
        if start == "nonsense":
            self.talk_nonsense()
        if start == "slow":
            (Path(folder) / "loading").touch()
            time.sleep(60)
        self.folder = Path(folder)
        self.config = EngineConfig()
        self.max_model_len = 1000
        self.summary = {"model": "stub", "dtype": "bfloat16"}
        self.step_seconds = step_seconds
        self.live: dict[str, list[Any]] = {}
        self.ended: list[RequestOutput] = []
        self.kept: dict[str, NamedPrefix] = {}
        self.steps = self.looks = self.version = 0

    def __repr__(self) -> str:
        return "StubEngine()"

    def write(self, line: str) -> None:
        with (self.folder / "log").open("a") as log:
            log.write(line + "\n")

    def talk_nonsense(self) -> None:
        """Write what is no message to the front end, in the engine process."""
        os.write(int(sys.argv[1]), b"\xff" * 8)
        time.sleep(60)

    def compile_progress(self) -> CompileProgress:
        return CompileProgress(3, 20, waiting=(self.folder / "compiling").exists())

    def stats(self) -> EngineStats:
        stats = EngineStats("stub", "cpu", max_num_seqs=8, page_bytes=16, kv_bytes_total=1600)
        stats.steps, stats.num_running = self.steps, len(self.live)
        stats.steps_by_size = {2: self.steps}
        stats.requests = RequestStats(1000)
        stats.requests.histograms["request_params_n"].observe(2.0)
        return stats

    def startup_seconds(self) -> dict[str, float]:
        return {"weights": 0.25}

    def kernels(self) -> list:
        return []

    def limit_grammar_cache(
        self, size: int, num_bytes: float, total_bytes: float, idle_seconds: float
    ) -> None:
        self.write(f"grammars {size} {num_bytes} {total_bytes} {idle_seconds}")

    def structured_masks(self, params: SamplingParams, wanted: Any = None) -> list:
        source = "" if wanted is None else wanted.constraint.source
        self.write(f"begin masks {source}")
        while source == "slow" and (self.folder / "mask_gate").exists():
            time.sleep(0.005)
        self.write(f"masks {source} {0 if wanted is None else wanted.seconds:g}")
        if source == "bad":
            raise InvalidRequestError("the regex is not valid: bad")
        return [object()] * params.num_sequences

    def add_prefix(self, name, token_ids, *, cache_salt=None, text=None) -> None:
        self.kept[name] = NamedPrefix(name, tuple(token_ids), cache_salt, (1, 2), text)

    def drop_prefix(self, name: str) -> None:
        if name not in self.kept:
            raise InvalidRequestError(f"no prefix is named {name!r}")
        del self.kept[name]

    def prefixes(self) -> list[NamedPrefix]:
        return list(self.kept.values())

    @property
    def weights_version(self) -> int:
        return self.version

    def start_weight_update(self, *, partial=False, mapping=None) -> None:
        self.write(f"start {partial} {mapping if isinstance(mapping, str) else bool(mapping)}")

    def add_weights(self, items) -> None:
        for name, array in items:
            if name == "bad":
                raise InvalidWeightsError("bad is no tensor")
            array = np.asarray(array)
            self.write(f"{name} {array.dtype} {array.shape} {array.astype(float).sum():g}")

    def try_finish_weight_update(self, mode="wait") -> int | None:
        self.write(f"finish {mode}")
        self.looks += 1
        if mode == "wait" and self.looks % 3:
            return None
        self.version += 1
        return self.version

    def cancel_weight_update(self) -> None:
        self.write("cancel")

    def reset_prefix_cache(self) -> None:
        raise ZeroDivisionError("secret")

    def add_request(self, request_id, prompt_token_ids, params, **options) -> None:
        first = prompt_token_ids[0]
        if first == REFUSED:
            raise InvalidRequestError("thirteen")
        if first == CRASH_OF_ADD:
            raise ZeroDivisionError("secret")
        metrics = RequestMetrics(time.monotonic())
        self.write(f"add {request_id} {sorted(set(options) - {'prompt', 'masks'})}")
        self.live[request_id] = [0, params, list(prompt_token_ids), metrics, options]

    def abort_request(self, request_id: str) -> None:
        self.write(f"abort {request_id}")
        found = self.live.pop(request_id, None)
        if found is not None:
            self.ended.append(self.output(request_id, found, reason="abort"))

    def has_unfinished_requests(self) -> bool:
        return bool(self.live or self.ended)

    def step(self) -> list[RequestOutput]:
        while (self.folder / "gate").exists():
            time.sleep(0.005)
        time.sleep(self.step_seconds)
        self.steps += 1
        if self.steps % 50 == 0:
            (self.folder / "steps").write_text(str(self.steps))
        outputs, self.ended = self.ended, []
        for name, request in list(self.live.items()):
            count, params, prompt, metrics, _ = request
            if prompt[0] == NONSENSE:
                self.talk_nonsense()
            if prompt[0] == CRASH_OF_STEP:
                raise MemoryError("the device is gone")
            metrics.first_token_time = metrics.first_token_time or time.monotonic()
            request[0] = count + 1
            failed = prompt[0] == GRAMMAR and count == 2
            done = count + 1 == params.max_tokens
            reason = "error" if failed else "length" if done else None
            if done or failed:
                del self.live[name]
                metrics.finished_time = time.monotonic()
            if reason or params.output_kind is not RequestOutputKind.FINAL_ONLY:
                outputs.append(self.output(name, request, reason=reason))
        return outputs

    def output(self, name: str, request: list[Any], reason: Any) -> RequestOutput:
        count, params, prompt, metrics, options = request
        start = count - 1 if params.output_kind is RequestOutputKind.DELTA else 0
        tokens = list(range(start, count))
        completion = CompletionOutput(0, "x" * len(tokens), tokens, finish_reason=reason)
        if reason == "error":
            completion.error = GrammarFailedError("no token fits the grammar")
            completion.stop_reason = str(completion.error)
        if prompt[0] == LOGPROBS:
            completion.cumulative_logprob = -0.5 * count
            completion.logprobs = FlatLogprobs(lambda token: None)
            for token in tokens:
                completion.logprobs.add((token, -0.5, 1), [token, 6, 7], [-0.5, -1.0, -2.0])
        output = RequestOutput(name, options.get("prompt"), prompt, None, [completion])
        output.finished, output.metrics = reason is not None, metrics
        output.num_cached_tokens = 4
        output.error = completion.error
        if prompt[0] == LOGPROBS:
            output.prompt_logprobs = [None, {3: Logprob(-1.0, 2)}]
        if options.get("keep_as") is not None and output.finished:
            output.error = OutOfMemoryError(f"no room for {options['keep_as'].name}")
        if options.get("prefix") is not None:
            output.prompt_token_ids = [1, 2, *prompt]
        if prompt[0] == OVERLOADED:
            output.error = OverloadedError("full", "queued_tokens")
        return output


def prepare(engine: StubEngine) -> None:
    """Wait for a file, as for programs that compile."""
    while not (engine.folder / "prepared").exists():
        time.sleep(0.01)


def make(**arguments: Any) -> StubEngine:
    return StubEngine(**arguments)
