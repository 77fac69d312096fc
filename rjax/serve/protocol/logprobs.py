"""Logprobs in the two formats of OpenAI's API."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rjax.outputs import Logprob
from rjax.sampling import SamplingParams
from rjax.serve.protocol.errors import ApiError

_LOWEST = -9999.0  # instead of -inf, which JSON does not support


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
        params: of the request.
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
    entries: "Sequence[dict[int, Logprob] | None]",
    offsets: list[int],
    token_text: Callable[[int], str],
    *,
    as_token_ids: bool = False,
) -> dict[str, Any]:
    """The fields of `rjax.serve.protocol.responses.CompletionLogprobs`.

    Args:
        token_ids: of the text.
        entries: logprobs of each token; None for a prompt's first token.
        offsets: of each token in the text.
        token_text: text of a token alone.
        as_token_ids: write ``token_id:N`` instead of a token's text.
    """
    values: list[float | None] = []
    tokens: list[str] = []
    tops: list[dict[str, float] | None] = []
    for token, entry in zip(token_ids, entries, strict=True):
        own = None if entry is None else entry[token]
        text = token_text(token) if own is None else _text(own, token)
        tokens.append(_named(token) if as_token_ids else text)
        values.append(None if own is None else _value(own))
        top: dict[str, float] | None = None
        if entry is not None:
            top = {}
            for other, logprob in entry.items():
                name = _named(other) if as_token_ids else _text(logprob, other)
                value = _value(logprob)
                top[name] = max(top[name], value) if name in top else value
        tops.append(top)
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": tokens,
        "top_logprobs": tops,
    }


def chat_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[dict[int, Logprob]],
    top: int,
    token_bytes: Callable[[int], bytes],
    *,
    as_token_ids: bool = False,
) -> dict[str, Any]:
    """The fields of `rjax.serve.protocol.responses.ChatLogprobs`, with the ``top`` most likely
    tokens at each position.

    ``token_bytes`` gives the bytes of a token, which may be a part of a character. ``as_token_ids``
    writes ``token_id:N`` instead of a token's text; ``bytes`` are still those of the text.
    """
    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        best = sorted(entry.items(), key=lambda item: item[1].rank)[:top]
        own = _top(token, entry[token], token_bytes, as_token_ids)
        others = [_top(i, found, token_bytes, as_token_ids) for i, found in best]
        content.append({**own, "top_logprobs": others})
    return {"content": content, "refusal": None}


def prompt_logprobs(
    entries: "Sequence[dict[int, Logprob] | None] | None",
) -> list[dict[str, Any] | None] | None:
    """Prompt logprobs in vLLM's format, by token id."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": _value(found),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token, found in entry.items()
        }
        for entry in entries
    ]


def _top(
    token: int, found: Logprob, token_bytes: Callable[[int], bytes], as_token_ids: bool
) -> dict[str, Any]:
    name = _named(token) if as_token_ids else _text(found, token)
    return {"token": name, "logprob": _value(found), "bytes": list(token_bytes(token))}


def _text(found: Logprob, token: int) -> str:
    return _named(token) if found.decoded_token is None else found.decoded_token


def _named(token: int) -> str:
    return f"token_id:{token}"


def _value(found: Logprob) -> float:
    return max(found.logprob, _LOWEST)
