"""Conversations as prompts, rendered by a tokenizer's chat template."""

from typing import Any

from rjax.errors import InvalidRequestError, without_frames
from rjax.prompts import Prompt, encode_texts, split_conversations
from rjax.tokenization import Tokenizer, encode_shared_prefix


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
