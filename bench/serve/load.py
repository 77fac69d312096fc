"""Loads of `bench.server_host` and `bench.server_share`: streams that all arrive at once, with a
shared prefix, and what their clients see."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rjax.benchmarks.stream_client import (
    Address,
    Arrival,
    Streamed,
    stream_load_in_processes,
)
from rjax.models import BUNDLED_MODEL, resolve_folder
from rjax.tokenization import Tokenizer

SHARED, UNIQUE = 2048, 64
"""Tokens of a prompt."""

_FIRST_ID, _END_ID = 40, 300  # tokens of the bundled model's vocabulary that prompts are drawn from
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up the {name} of a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "day": {"type": "string"}},
                "required": ["place"],
            },
        },
    }
    for name in ("weather", "time", "population")
]


@dataclasses.dataclass(frozen=True, slots=True)
class ServerLoad:
    """A number of equal streams.

    Attributes:
        streams: that are sent at once.
        max_tokens: of each.
        chat: chats instead of completions of token ids.
        tools: the chats offer three tools.
        stop: three stop strings, which no answer has.
        usage: usage in each chunk.
        logprobs: of each token; 0 for none.
        model: its name on the server.
    """

    streams: int
    max_tokens: int = 128
    chat: bool = False
    tools: bool = False
    stop: bool = False
    usage: bool = False
    logprobs: int = 0
    model: str = "bench"

    @property
    def name(self) -> str:
        """In a table."""
        parts = ["chats" if self.chat else "completions"]
        parts += ["tools"] * self.tools + ["stop strings"] * self.stop + ["usage"] * self.usage
        parts += [f"{self.logprobs} logprobs"] * bool(self.logprobs)
        return ", ".join(parts)

    def prompts(self, seed: int) -> list[list[int]]:
        """Token ids; the shared part is the same for all seeds."""
        shared = np.random.default_rng(7).integers(_FIRST_ID, _END_ID, SHARED).tolist()
        shape = self.streams, UNIQUE
        own = np.random.default_rng(seed).integers(_FIRST_ID, _END_ID, shape).tolist()
        return [shared + ids for ids in own]

    def arrivals(self, seed: int) -> list[Arrival]:
        """Its requests."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        if self.stop:
            body["stop"] = ["\n\n###", "Question:", "</answer>"]
        if self.usage:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if self.tools:
            body["tools"] = _TOOLS
        prompts = self.prompts(seed)
        if not self.chat:
            if self.logprobs:
                body["logprobs"] = self.logprobs
            return [Arrival(0.0, "/v1/completions", {**body, "prompt": ids}) for ids in prompts]
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": self.logprobs}
        return [
            Arrival(0.0, "/v1/chat/completions", {**body, "messages": messages})
            for messages in _conversations(prompts)
        ]


def _conversations(prompts: Sequence[Sequence[int]]) -> list[list[dict[str, str]]]:
    tokens = Tokenizer(resolve_folder(BUNDLED_MODEL))

    def text(ids: Sequence[int], length: int) -> str:
        """A text of about ``length`` tokens; decoded random ids encode to more than they were."""
        decoded = tokens.decode(list(ids), skip_special_tokens=True)
        return tokens.decode(tokens.encode(decoded)[:length], skip_special_tokens=True)

    system = {"role": "system", "content": text(prompts[0][:SHARED], SHARED)}
    questions = [text(ids[SHARED:], UNIQUE) for ids in prompts]
    return [[system, {"role": "user", "content": question}] for question in questions]


def measure_load(
    server: Address,
    load: ServerLoad,
    clients: int,
    around: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """The figures of a load, after one like it that fills the prefix cache and opens all paths.

    Args:
        server: where it listens.
        load: what is sent.
        clients: processes that send it.
        around: called before and after the load that counts.

    Raises:
        RuntimeError: an answer is not whole.
    """
    stream_load_in_processes(server, load.arrivals(1), clients)
    arrivals = load.arrivals(2)
    around()
    answers = stream_load_in_processes(server, arrivals, clients)
    around()
    return figures(answers, load.max_tokens)


def figures(answers: Sequence[Streamed], tokens: int) -> dict[str, float]:
    """Throughput and latency of a load; raises RuntimeError if an answer is not whole."""
    for answer in answers:
        if not answer.ended or answer.status != 200 or "error" in (answer.events or ["error"])[-1]:
            last = answer.events[-1:] or ["nothing"]
            raise RuntimeError(f"an answer failed: status {answer.status}, {last[0][:300]}")
    begin = min(answer.sent for answer in answers)
    found = latencies([(answer.sent, answer.times) for answer in answers])
    span = max(answer.times[-1] for answer in answers) - begin
    chunks = float(sum(len(answer.times) for answer in answers))
    rate = len(answers) * tokens / span
    return {"tokens_per_s": rate, "seconds": span, "chunks": chunks, **found}


def latencies(streams: Sequence[tuple[float, Sequence[float]]]) -> dict[str, float]:
    """TTFT and the gaps between the pieces of a stream, in milliseconds.

    Args:
        streams: when each was sent, and when its pieces came, in seconds.
    """
    first = np.array([times[0] - sent for sent, times in streams])
    gaps = np.concatenate([np.diff(times) for _, times in streams])
    found = {}
    for name, values in (("ttft_ms", first), ("gap_ms", gaps)):
        for p in (50, 99):
            found[f"{name}_p{p}"] = float(np.percentile(values, p)) * 1e3
        found[f"{name}_max"] = float(values.max()) * 1e3
    return found
