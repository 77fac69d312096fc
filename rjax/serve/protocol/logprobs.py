"""Logprobs in the two formats of OpenAI's API."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload, override

from rjax.outputs import FlatLogprobs, Logprob, SampleLogprobs, TokenChance, chances
from rjax.sampling import SamplingParams
from rjax.serve.protocol.errors import ApiError

_READ_AT_ONCE = 128
LOWEST = -9999.0
"""Instead of -inf, which JSON does not support."""


class LazyList(Sequence[Any]):
    """A list whose entries are made when they are read, some at a time.

    Half a million log-probabilities are millions of objects: a call in C that makes or checks them
    all, or a garbage collection among them, stops all threads for a second.

    Args:
        length: number of entries.
        make: returns the entries of a slice of indices.
    """

    def __init__(self, length: int, make: Callable[[slice], list[Any]]) -> None:
        self._length, self._make = length, make

    @override
    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    @override
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._make(index)
        index = range(self._length)[index]
        [found] = self._make(slice(index, index + 1))
        return found

    @override
    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self._length, _READ_AT_ONCE):
            yield from self._make(slice(start, start + _READ_AT_ONCE))


def within_logprobs_limit(
    params: SamplingParams,
    lengths: Sequence[int],
    max_model_len: int,
    most: int,
    *,
    max_tokens_given: bool = True,
) -> SamplingParams:
    """The parameters of a request whose logprobs do not exceed the limit.

    Args:
        params: the request's sampling parameters.
        lengths: tokens of each prompt; each of the ``n`` samples repeats its prompt's logprobs.
        max_model_len: most tokens of a prompt and its output.
        most: maximum of logprobs; every alternative of every token counts.
        max_tokens_given: the request has ``max_tokens``; otherwise it is lowered to what fits.

    Raises:
        ApiError: 400, they exceed it.
    """
    count = 0
    if params.prompt_logprobs is not None:
        count += sum(lengths) * (params.prompt_logprobs + 1) * params.n
    if params.logprobs is not None:
        each = (params.logprobs + 1) * params.num_sequences
        room = [max(0, max_model_len - length) for length in lengths]
        if params.max_tokens is not None:
            room = [min(r, params.max_tokens) for r in room]
        fit = (most - count) // (each * len(lengths))
        if fit >= 1 and fit < max(room) and not max_tokens_given:
            params = dataclasses.replace(params, max_tokens=fit)
            room = [min(r, fit) for r in room]
        count += sum(room) * each
    if count > most:
        raise ApiError(
            400,
            f"up to {count} logprobs are asked for, every alternative of every token counted; at "
            f"most {most} are given in one request: ask for fewer alternatives, samples, prompts "
            "or max_tokens",
            param="logprobs" if params.prompt_logprobs is None else "prompt_logprobs",
        )
    return params


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[list[TokenChance] | None],
    offsets: list[int],
    token_text: Callable[[int], str],
    *,
    as_token_ids: bool = False,
) -> dict[str, Any]:
    """The fields of `rjax.serve.protocol.responses.CompletionLogprobs`.

    Args:
        token_ids: the text's token ids.
        entries: log-probabilities for each token, its own first; None for a prompt's first token.
        offsets: offset of each token in the text.
        token_text: text of a token alone.
        as_token_ids: write ``token_id:N`` instead of a token's text.
    """
    name = _named if as_token_ids else token_text
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(max(entry[0][1], LOWEST))
        top = {name(other): max(logprob, LOWEST) for other, logprob, _ in entry}
        if len(top) < len(entry):  # tokens of the same text: the likeliest
            best = sorted(entry, key=_rank, reverse=True)
            top |= {name(other): max(logprob, LOWEST) for other, logprob, _ in best}
        tops.append(top)
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": [name(token) for token in token_ids],
        "top_logprobs": tops,
    }


def lazy_completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[list[TokenChance] | None],
    offsets: list[int],
    token_text: Callable[[int], str],
    *,
    as_token_ids: bool = False,
) -> dict[str, Any]:
    """`completion_logprobs` with lazy lists, for `rjax.serve.http.chunked_json.iter_json`."""

    def tops(part: slice) -> list[dict[str, float] | None]:
        found = completion_logprobs(
            token_ids[part], entries[part], offsets[part], token_text, as_token_ids=as_token_ids
        )
        return found["top_logprobs"]

    def values(part: slice) -> list[float | None]:
        return [None if entry is None else max(entry[0][1], LOWEST) for entry in entries[part]]

    name = _named if as_token_ids else token_text
    return {
        "text_offset": offsets,
        "token_logprobs": LazyList(len(entries), values),
        "tokens": LazyList(len(token_ids), lambda part: [name(i) for i in token_ids[part]]),
        "top_logprobs": LazyList(len(entries), tops),
    }


def chat_logprobs(
    entries: Sequence[list[TokenChance]],
    top: int,
    token_text: Callable[[int], str],
    token_bytes: Callable[[int], bytes],
    *,
    as_token_ids: bool = False,
) -> dict[str, Any]:
    """The fields of `rjax.serve.protocol.responses.ChatLogprobs`, with the ``top`` most likely
    tokens at each position.

    Args:
        entries: log-probabilities for each token, its own first.
        top: tokens to report besides it.
        token_text: text of a token alone.
        token_bytes: its bytes, which may be a part of a character.
        as_token_ids: write ``token_id:N`` instead of a token's text; ``bytes`` are still those of
            the text.
    """
    name = _named if as_token_ids else token_text

    def fields(token: int, logprob: float) -> dict[str, Any]:
        value = max(logprob, LOWEST)
        return {"token": name(token), "logprob": value, "bytes": list(token_bytes(token))}

    content = []
    for entry in entries:
        token, logprob, _ = entry[0]
        best = sorted(entry, key=_rank)[:top]
        others = [fields(other, found) for other, found, _ in best]
        content.append({**fields(token, logprob), "top_logprobs": others})
    return {"content": content, "refusal": None}


def lazy_chat_logprobs(
    entries: Sequence[list[TokenChance]],
    top: int,
    token_text: Callable[[int], str],
    token_bytes: Callable[[int], bytes],
    *,
    as_token_ids: bool = False,
) -> dict[str, Any]:
    """`chat_logprobs` with a lazy list, for `rjax.serve.http.chunked_json.iter_json`."""

    def content(part: slice) -> list[dict[str, Any]]:
        found = chat_logprobs(
            entries[part], top, token_text, token_bytes, as_token_ids=as_token_ids
        )
        return found["content"]

    return {"content": LazyList(len(entries), content), "refusal": None}


def lazy_chances(logprobs: "SampleLogprobs | list[dict[int, Logprob] | None]") -> LazyList:
    """`rjax.outputs.token_chances`, some positions at a time; None for a prompt's first token."""
    if isinstance(logprobs, FlatLogprobs):
        return LazyList(len(logprobs), lambda part: logprobs[part].chances())
    return LazyList(
        len(logprobs), lambda part: [entry and chances(entry) for entry in logprobs[part]]
    )


def joined(first: Sequence[Any], second: Sequence[Any]) -> LazyList:
    """Two sequences as one."""

    def both(part: slice) -> list[Any]:
        start, stop, _ = part.indices(len(first) + len(second))
        shift = len(first)
        return [*first[start:stop], *second[max(0, start - shift) : max(0, stop - shift)]]

    return LazyList(len(first) + len(second), both)


def lazy_prompt_logprobs(
    entries: "Sequence[dict[int, Logprob] | None] | None",
) -> LazyList | None:
    """Prompt logprobs in vLLM's format, by token id."""
    if entries is None:
        return None
    return LazyList(len(entries), lambda part: _prompt_logprobs(entries[part]))


def _prompt_logprobs(
    entries: "Sequence[dict[int, Logprob] | None]",
) -> list[dict[str, Any] | None]:
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": max(found.logprob, LOWEST),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token, found in entry.items()
        }
        for entry in entries
    ]


def _rank(entry: TokenChance) -> int:
    return entry[2]


def _named(token: int) -> str:
    return f"token_id:{token}"
