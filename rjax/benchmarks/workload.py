"""Requests for benchmarks: random, or from a file of conversations."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how many tokens to generate for it."""

    prompt: list[int]
    output_tokens: int


def synthetic(
    count: int, *, prefix: int, own: int, output: int, vocab_size: int, seed: int
) -> list[Request]:
    """Random token ids: ``prefix`` shared tokens, then ``own`` unique tokens of each request."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab_size, prefix).tolist()
    return [
        Request(shared + rng.integers(0, vocab_size, own).tolist(), output) for _ in range(count)
    ]


def from_file(
    path: Path,
    encode: Callable[[str], list[int]],
    *,
    count: int,
    prefix: list[int],
    longest: int,
    seed: int,
) -> list[Request]:
    """Requests from a file, in a random order fixed by the seed; too long ones are left out.

    Args:
        path: a JSON list of ShareGPT conversations (``{"conversations": [{"from": "human",
            "value": ...}, {"from": "gpt", "value": ...}]}``): the first question is the prompt and
            its answer's length the output; or JSON lines with ``prompt`` and, if wanted,
            ``output_tokens`` (128 otherwise).
        encode: text to token ids.
        count: maximum number of requests.
        prefix: put before each prompt.
        longest: most tokens of prompt and output together.

    Raises:
        ValueError: the file has neither format, or no request that fits.
    """
    found = []
    pairs = _pairs(path)
    for i in np.random.default_rng(seed).permutation(len(pairs)):
        text, answer = pairs[i]
        prompt = prefix + encode(text)
        output = answer if isinstance(answer, int) else len(encode(answer))
        if output > 0 and len(prompt) + output <= longest:
            found.append(Request(prompt, output))
        if len(found) == count:
            break
    if not found:
        raise ValueError(f"{path} holds no request of at most {longest} tokens with its output")
    return found


def _pairs(path: Path) -> list[tuple[str, str | int]]:
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        rows: list[Any] = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    pairs: list[tuple[str, str | int]] = []
    for number, row in enumerate(rows):
        match row:
            case {"conversations": [{"value": str(question)}, {"value": str(answer)}, *_]}:
                pairs.append((question, answer))
            case {"conversations": _}:
                continue  # a conversation without an answer
            case {"prompt": str(prompt)}:
                pairs.append((prompt, int(row.get("output_tokens", 128))))
            case _:
                raise ValueError(
                    f"{path}, entry {number}: neither a ShareGPT conversation ('conversations') "
                    "nor a line with a 'prompt'"
                )
    return pairs
