"""The forms of a prompt as typed dicts, in the module where vLLM has them."""

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt of text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt of token ids; a text beside them is only shown in the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


type PromptType = str | list[int] | TextPrompt | TokensPrompt
"""One prompt."""
