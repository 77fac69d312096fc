"""The forms a prompt may take, checked and brought into one."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rjax.errors import InvalidRequestError, without_frames
from rjax.tokenization import Tokenizer, encode_shared_prefix
from rjax.vllm.names import PROMPT_KEYS, is_off

_FORMS = 'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": [...]}'


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its text, its token ids, or both."""

    text: str | None
    token_ids: list[int] | None


def raise_first_refusal(prompts: "list[Prompt | InvalidRequestError]") -> None:
    """Raise the first error that stands in a prompt's place, if there is one. It leaves the list,
    which frames of its traceback refer to."""
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, InvalidRequestError):
            del prompts[i]
            try:
                raise prompt
            finally:
                del prompt


def split_prompts(prompts: Any) -> list[Any]:
    """The single prompts of what `LLM.generate` was given; a lone prompt becomes a list of one.

    Raises:
        InvalidRequestError: nothing was given, or nothing that could be prompts.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidRequestError(
            f"prompts is {type(prompts).__name__}; give a prompt or a list of prompts: {_FORMS}"
        )
    if not prompts:
        raise InvalidRequestError("prompts is an empty list; give at least one prompt")
    if isinstance(prompts[0], int | np.integer):
        return [prompts]
    return list(prompts)


def parse_prompt(prompt: Any) -> Prompt:
    """One prompt in any of its forms. Token ids are checked for being whole numbers; the engine
    checks them against the model. A text may be empty: the BOS token is then the prompt.

    Raises:
        InvalidRequestError: no token ids, or none of the forms.
    """
    if isinstance(prompt, str):
        return Prompt(prompt, None)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    if isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes):
        return Prompt(None, _parse_ids(prompt))
    raise InvalidRequestError(f"a prompt is {type(prompt).__name__}; give {_FORMS}")


def encode_texts(
    prompts: "list[Prompt | InvalidRequestError]", encode: Callable[[list[str]], list[list[int]]]
) -> "list[Prompt | InvalidRequestError]":
    """Fill in the token ids of text prompts: all at once, one by one where a text is bad. A prompt
    without tokens is refused."""
    texts = [p.text or "" for p in prompts if isinstance(p, Prompt) and p.token_ids is None]
    rows: list[list[int] | InvalidRequestError] = []
    try:
        rows.extend(encode(texts))
    except InvalidRequestError:
        rows.clear()
        for text in texts:
            try:
                rows.append(encode([text])[0])
            except InvalidRequestError as error:
                rows.append(without_frames(error))
    found = iter(rows)
    filled: list[Prompt | InvalidRequestError] = []
    for prompt in prompts:
        if isinstance(prompt, Prompt) and prompt.token_ids is None:
            row = next(found)
            if not row:
                row = InvalidRequestError(
                    "the prompt is empty, and the tokenizer adds no BOS token; give at least one "
                    "character"
                )
            filled.append(row if isinstance(row, InvalidRequestError) else Prompt(prompt.text, row))
        else:
            filled.append(prompt)
    return filled


def split_conversations(messages: Any) -> list[Any]:
    """The single conversations of what `LLM.chat` was given; a lone one becomes a list of one.

    Raises:
        InvalidRequestError: nothing was given, or nothing that could be conversations.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError(
            f"messages is {type(messages).__name__}; give a list of "
            '{"role": ..., "content": ...} objects, or a list of such lists'
        )
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message")
    if isinstance(messages[0], Sequence) and not isinstance(messages[0], str | bytes):
        return list(messages)
    return [messages]


def _parse_mapping(prompt: Mapping[Any, Any]) -> Prompt:
    others = [key for key in prompt if key not in ("prompt", "prompt_token_ids")]
    for key in others:
        if key in PROMPT_KEYS and not is_off(prompt[key]):
            raise InvalidRequestError(f"a prompt object has {key}: {PROMPT_KEYS[key]}")
    unknown = [key for key in others if key not in PROMPT_KEYS]
    if unknown or len(others) == len(prompt):
        found = f"the keys {unknown}" if unknown else "no key"
        raise InvalidRequestError(f"a prompt object has {found}; give {_FORMS}")
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"prompt is {type(text).__name__}; give a text")
    if "prompt_token_ids" not in prompt:
        return parse_prompt("" if text is None else text)
    ids = prompt["prompt_token_ids"]
    if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, str | bytes):
        raise InvalidRequestError(f"prompt_token_ids is {type(ids).__name__}; give a list")
    return Prompt(text, _parse_ids(ids))


def _parse_ids(ids: Any) -> list[int]:
    if len(ids) == 0:
        raise InvalidRequestError("the prompt is empty; give at least one token id")
    if set(map(type, ids)) == {int}:
        return list(ids)  # as nearly always, and many times faster than one by one
    found = []
    for i, token in enumerate(ids):
        if isinstance(token, bool | np.bool_) or not isinstance(token, int | np.integer):
            raise InvalidRequestError(
                f"token {i} of the prompt is {token!r}, which is no whole number; give token ids"
            )
        found.append(operator.index(token))
    return found


def encode_conversations(
    tokenizer: Tokenizer, messages: Any, **options: Any
) -> "list[Prompt | InvalidRequestError]":
    """Text and token ids of each conversation, or the error that refuses it.

    Args:
        tokenizer: tokenizer with a chat template.
        messages: one conversation or a list of them; see `LLM.chat`.
        options: options of `Tokenizer.apply_chat_template`.

    Raises:
        InvalidRequestError: ``messages`` is neither a conversation nor a list of them.
    """
    found: list[Prompt | InvalidRequestError] = []
    for conversation in split_conversations(messages):
        try:
            text = tokenizer.apply_chat_template(conversation, **options)
            if not text:
                raise InvalidRequestError("the chat template made an empty prompt")
            found.append(Prompt(text, None))
        except InvalidRequestError as error:
            found.append(without_frames(error))
    return encode_texts(found, lambda texts: encode_shared_prefix(tokenizer, texts, False))
