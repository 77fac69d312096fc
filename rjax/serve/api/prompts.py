"""Convert the prompts of requests to token ids."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from rjax.errors import ContextLengthError, OverloadedError
from rjax.serve.api.service import Service
from rjax.serve.http.auth import Tenant
from rjax.serve.protocol.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from rjax.serve.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    Message,
    TokenizeRequest,
    Tool,
)
from rjax.serve.workers.tasks import Layout

type TokenPrompt = tuple[str | None, list[int]]


def kept_tokens(
    body: CompletionRequest | ChatCompletionRequest,
    max_tokens: int | None,
    service: Service,
    prefix: int = 0,
) -> int | None:
    """Tokens to keep at the end of each prompt; None keeps all.

    ``truncate_prompt_tokens`` -1 keeps what fits beside ``prefix`` and ``max_tokens`` tokens, or
    beside one token if ``max_tokens`` is None.

    Raises:
        ApiError: 400, they leave no room for a prompt.
    """
    if body.truncate_prompt_tokens != -1:
        return body.truncate_prompt_tokens
    room = service.max_model_len - prefix - (max_tokens or 1)
    if room < 1:
        taken = f"prefix has {prefix} tokens and " if prefix else ""
        raise ApiError(
            400,
            f"truncate_prompt_tokens is -1, but {taken}max_tokens is {max_tokens or 1}, which "
            f"leaves no token of max_model_len {service.max_model_len} for a prompt; lower "
            "max_tokens",
            param="truncate_prompt_tokens",
        )
    return room


async def completion_prompts(
    body: CompletionRequest, last: int | None, tenant: Tenant, service: Service
) -> list[TokenPrompt]:
    """The text (None if unknown) and the last ``last`` token ids of each prompt.

    Raises:
        ApiError, InvalidRequestError, OverloadedError.
    """
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif not prompt:
        raise ApiError(400, "prompt is an empty list; give a prompt", param="prompt")
    elif isinstance(prompt[0], int):
        prompts = [prompt]
    else:
        prompts = prompt
    if len(prompts) > service.limits.prompts:
        raise ApiError(
            400,
            f"{len(prompts)} prompts; give at most {service.limits.prompts} in one request",
            param="prompt",
        )
    if any(not item and not isinstance(item, str) for item in prompts):
        raise ApiError(400, "a prompt is empty; give at least one token", param="prompt")
    if isinstance(prompts[0], str):
        texts = cast(list[str], prompts)
        special = body.add_special_tokens
        rows = await encode(
            texts,
            tenant,
            service,
            "prompt",
            # A prefix already has the BOS token.
            add_special_tokens=body.prefix is None if special is None else special,
            repeat=special is True,
            last=last,
        )
        if not all(rows):
            raise ApiError(
                400,
                "a prompt is empty, and no BOS token is added; give at least one character",
                param="prompt",
            )
        # The text of a truncated prompt is unknown.
        cut = [last is not None and len(row) == last for row in rows]
        return [(None if c else t, row) for t, row, c in zip(texts, rows, cut, strict=True)]
    return [(None, tokens if last is None else tokens[-last:]) for tokens in prompts]


async def encode(
    texts: Sequence[str],
    tenant: Tenant,
    service: Service,
    param: str,
    *,
    add_special_tokens: bool = True,
    repeat: bool = False,
    last: int | None = None,
    most: int | None = None,
) -> list[list[int]]:
    """Tokenise texts in a worker process.

    Args:
        texts: texts to tokenise.
        tenant: the client's tenant.
        service: the app's service.
        param: request field of the texts, for messages.
        add_special_tokens: add the BOS token.
        repeat: add the BOS token also to a text that starts with it.
        last: keep only this many tokens at the end of each text.
        most: maximum number of tokens per text; by default that of a prompt to run.

    Raises:
        ApiError, InvalidRequestError, OverloadedError.
    """
    for text in texts:
        service.check_text(text, param)
    encoded = [_utf8(text, param) for text in texts]
    task = {
        "task": "encode",
        "sizes": [len(text) for text in encoded],
        "add_special_tokens": add_special_tokens,
        "repeat": repeat,
        "last": last,
        "max_model_len": service.max_model_len,
        "most_tokens": service.max_model_len - 1 if most is None else most,
    }
    head, data = await _run(service, tenant, task, b"".join(encoded), "tokenising", param)
    return _rows(head["sizes"], data)


async def chat_prompt(
    body: ChatCompletionRequest,
    tools: list[Tool],
    last: int | None,
    tenant: Tenant,
    service: Service,
) -> TokenPrompt:
    """Token ids of a chat request's prompt.

    Args:
        body: the request's body.
        tools: functions that are described to the model.
        last: keep only this many tokens at the end.
        tenant: the client's tenant.
        service: the app's service.

    Raises:
        ApiError, InvalidRequestError, OverloadedError.
    """
    options = layout_options(body, service)
    special = body.add_special_tokens
    tokens = await message_tokens(
        body.messages, tools, options, tenant, service, add_special_tokens=special, last=last
    )
    return None, tokens


def layout_options(
    body: ChatCompletionRequest | TokenizeRequest, service: Service
) -> dict[str, Any]:
    """The options of the chat template in a request.

    Raises:
        ApiError: 400.
    """
    kwargs = body.chat_template_kwargs or {}
    if len(kwargs) > 32 or any(len(name) > service.limits.name_chars for name in kwargs):
        raise ApiError(
            400, "chat_template_kwargs: give at most 32 names", param="chat_template_kwargs"
        )
    asked = "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt
    if asked and body.continue_final_message:
        raise ApiError(
            400,
            "add_generation_prompt and continue_final_message are both true; give one of them",
            param="continue_final_message",
        )
    return {
        "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
        "continue_final_message": body.continue_final_message,
        "chat_template_kwargs": kwargs,
    }


async def message_tokens(
    messages: list[Message],
    tools: list[Tool],
    options: dict[str, Any],
    tenant: Tenant,
    service: Service,
    *,
    add_special_tokens: bool = False,
    last: int | None = None,
    most: int | None = None,
) -> list[int]:
    """Token ids of messages, rendered by the chat template.

    The template is the server's, never a request's. It runs in a sandbox in a worker process, which
    is killed if it takes too long or too much memory. ``add_special_tokens``, ``last`` and ``most``
    are as in `encode`.

    Raises:
        ApiError, InvalidRequestError, OverloadedError.
    """
    if not 1 <= len(messages) <= service.limits.messages:
        raise ApiError(
            400,
            f"{len(messages)} messages; give 1 to {service.limits.messages}",
            param="messages",
        )
    layout = Layout(
        messages=messages,
        tools=tools,
        tool_format=None if service.tools is None else service.tools.name,
        options=options,
        longest_text=service.longest_text,
        last=last,
        max_model_len=service.max_model_len,
        most_tokens=service.max_model_len - 1 if most is None else most,
        add_special_tokens=add_special_tokens,
    )
    data = _utf8(layout.model_dump_json(), "messages")
    task = {"task": "layout"}
    what = "laying out the messages"
    head, found = await _run(service, tenant, task, data, what, "messages")
    (tokens,) = _rows(head["sizes"], found)
    if not tokens:
        raise ApiError(400, "the messages make an empty prompt", param="messages")
    return tokens


async def _run(
    service: Service, tenant: Tenant, task: dict[str, Any], data: bytes, what: str, param: str
) -> tuple[dict[str, Any], bytes]:
    """Run a task on the texts of a request field, ``param``, in a worker process."""
    try:
        return await service.texts.run(task, data, tenant=tenant.name, what=what)
    except OverloadedError as error:
        service.metrics.rejected(error.reason)
        raise
    except ContextLengthError as error:
        raise ApiError(400, str(error), code=CONTEXT_LENGTH_EXCEEDED, param=param) from error


def _utf8(text: str, param: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, f"{param} is not valid Unicode", param=param) from error


def _rows(sizes: list[int], data: bytes) -> list[list[int]]:
    """Lists of token ids from a worker's result."""
    found = np.split(np.frombuffer(data, np.int32), np.cumsum(sizes)[:-1])
    return [row.tolist() for row in found]
