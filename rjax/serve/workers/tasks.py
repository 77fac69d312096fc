"""The tasks of a worker: render chat templates, tokenise texts, compile grammars."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from rjax.errors import ContextLengthError, InvalidRequestError
from rjax.serve.parsing.tools.prompt import conversation, tools_for_template
from rjax.serve.parsing.tools.registry import tool_format
from rjax.serve.protocol.requests import Message, Tool
from rjax.serve.workers.memory import resident_bytes
from rjax.structured.constraint import Constraint
from rjax.structured.grammar import NEEDED, compile_grammar, grammar_tokenizer
from rjax.structured.mask import first_bitmask
from rjax.tokenization import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """Data of the served model that a worker needs.

    Attributes:
        folder: folder of the tokenizer's files.
        chat_template: replaces the tokenizer's template; None keeps it.
        vocab_size: width of the logits.
        eos_token_ids: tokens that end a text under a grammar.
    """

    folder: str
    chat_template: str | None
    vocab_size: int
    eos_token_ids: list[int]


class Layout(BaseModel):
    """Messages to render by the chat template and to tokenise.

    Attributes:
        messages, tools: the request's messages and tools.
        tool_format: name of the tool format; None if the template alone writes calls.
        options: options of the chat template.
        longest_text: maximum of characters of a prompt.
        last: keep only this many tokens at the end.
        max_model_len: most tokens of a prompt and its output.
        most_tokens: maximum of tokens; below ``max_model_len`` if they are a prompt to run.
        add_special_tokens: add the BOS token before the template's output.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")

    messages: list[Message]
    tools: list[Tool]
    tool_format: str | None
    options: dict[str, Any]
    longest_text: int
    last: int | None
    max_model_len: int
    most_tokens: int
    add_special_tokens: bool


class Tasks:
    """The tasks of one model, by name. A task takes the JSON object and data of a message and
    returns those of its result.

    Args:
        model: data of the model to load.
    """

    def __init__(self, model: TextModel) -> None:
        self._tokenizer = Tokenizer(model.folder, chat_template=model.chat_template)
        self._llt = grammar_tokenizer(self._tokenizer, model.vocab_size, model.eos_token_ids)
        self._vocab_size = model.vocab_size
        self._by_name: dict[str, Callable[..., tuple[dict[str, Any], bytes]]] = {
            "layout": self._layout,
            "encode": self._encode,
            "compile": self._compile,
            "ping": lambda head, data: ({}, b""),  # whether a worker answers
        }

    def run(self, head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        """Run a task.

        Raises:
            InvalidRequestError: the client's text is invalid.
        """
        return self._by_name[head["task"]](head, data)

    def _layout(self, head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        task = Layout.model_validate_json(data)
        # Check the length before templates and tokenisation multiply it.
        self._check_length(sum(map(len, _texts(task))), task)
        tokenizer = self._tokenizer
        fmt = None if task.tool_format is None else tool_format(task.tool_format)
        text = tokenizer.apply_chat_template(
            conversation(task.messages, task.tools, tokenizer, fmt),
            tools=tools_for_template(task.tools, tokenizer),
            **task.options,
        )
        self._check_length(len(text), task)
        # Only a request that asks for them adds special tokens, also to a template that has some.
        rows = [tokenizer.encode(text, task.add_special_tokens, repeat=True)]
        return _answer(rows, task.last, task.most_tokens, task.max_model_len)

    def _encode(self, head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        ends = list(itertools.accumulate(head["sizes"], initial=0))
        texts = [data[start:end].decode() for start, end in itertools.pairwise(ends)]
        special, repeat = head["add_special_tokens"], head.get("repeat", False)
        rows = self._tokenizer.encode_batch(texts, special, repeat=repeat)
        return _answer(rows, head["last"], head["most_tokens"], head["max_model_len"])

    def _compile(self, head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        if self._llt is None:
            raise InvalidRequestError(NEEDED)
        before = resident_bytes()
        try:
            constraint = Constraint(head["kind"], data.decode(), head["outer"])
            matcher = compile_grammar(constraint, self._llt)
        except ValueError as error:
            raise InvalidRequestError(f"the {head['kind']} is not valid: {error}") from error
        try:
            first_bitmask(matcher, self._llt, self._vocab_size)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        return {"bytes": max(0, resident_bytes() - before)}, b""

    @staticmethod
    def _check_length(characters: int, task: Layout) -> None:
        if characters > task.longest_text:
            raise ContextLengthError.of_characters("the messages", characters, task.max_model_len)


def _answer(
    rows: list[list[int]], last: int | None, most: int, max_model_len: int
) -> tuple[dict[str, Any], bytes]:
    """A result with the token ids of all rows, concatenated as int32."""
    rows = rows if last is None else [row[-last:] for row in rows]
    for row in rows:
        if len(row) > most and most < max_model_len:
            raise ContextLengthError.of_tokens(len(row), max_model_len)
        if len(row) > most:
            raise InvalidRequestError(
                f"the text has {len(row)} tokens; at most {most} are returned"
            )
    return {"sizes": [len(row) for row in rows]}, b"".join(
        np.asarray(row, np.int32).tobytes() for row in rows
    )


def _texts(task: Layout) -> Iterator[str]:
    """All texts of a request that may become part of the prompt."""
    for message in task.messages:
        content = message.content or ""
        yield from [content] if isinstance(content, str) else (part.text for part in content)
        yield message.role
        yield message.name or ""
        yield message.refusal or ""
        yield message.reasoning or message.reasoning_content or ""
        for call in message.tool_calls or ():
            yield call.function.name
            yield call.function.arguments
    for tool in task.tools:
        yield tool.function.name
        yield tool.function.description or ""
        yield from _strings(tool.function.parameters)
    yield from _strings(task.options.get("chat_template_kwargs"))


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, including keys."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            yield from item
            left += item.values()
        elif isinstance(item, list):
            left += item
