"""Prompts of requests as token ids."""

from collections.abc import Sequence
from typing import Any, cast

from rjax.serve.errors import ApiError
from rjax.serve.requests import ChatBody, CompletionBody, Message, SamplingBody, Tool
from rjax.serve.service import Service
from rjax.serve.tools import conversation, tools_for_template

type TokenPrompt = tuple[str | None, list[int]]


async def completion_prompts(body: CompletionBody, service: Service) -> list[TokenPrompt]:
    """Text, where there is one, and token ids of each prompt.

    Raises:
        ApiError, InvalidRequestError.
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
    if not all(prompts):
        raise ApiError(400, "a prompt is empty; give at least one token", param="prompt")
    if isinstance(prompts[0], str):
        texts = cast(list[str], prompts)
        # After a prefix no second beginning token may follow.
        special = body.prefix is None
        rows = await encode(texts, service, "prompt", add_special_tokens=special)
        if not all(rows):
            raise ApiError(400, "a prompt has no token; give another text", param="prompt")
        found: list[TokenPrompt] = list(zip(texts, rows, strict=True))
    else:
        found = [(None, tokens) for tokens in prompts]
    return [_truncated(prompt, body) for prompt in found]


async def encode(
    texts: Sequence[str], service: Service, param: str, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Token ids of texts, off the event loop."""
    for text in texts:
        service.check_text(text, param)
    return await service.pool.run(
        service.tokenizer.encode_batch,
        list(texts),
        add_special_tokens,
        seconds=service.limits.template_seconds,
        task="tokenising",
    )


async def chat_prompt(body: ChatBody, tools: list[Tool], service: Service) -> TokenPrompt:
    """The laid out text of a chat request and its token ids.

    Args:
        body: of the request.
        tools: to show to the model.
        service: of the app.

    Raises:
        ApiError, InvalidRequestError.
    """
    kwargs = body.chat_template_kwargs or {}
    if len(kwargs) > 32 or any(len(name) > service.limits.name_chars for name in kwargs):
        raise ApiError(
            400, "chat_template_kwargs: give at most 32 names", param="chat_template_kwargs"
        )
    options = {
        "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
        "continue_final_message": body.continue_final_message,
        "chat_template_kwargs": kwargs,
    }
    return _truncated(await message_prompt(body.messages, tools, options, service), body)


async def message_prompt(
    messages: list[Message], tools: list[Tool], options: dict[str, Any], service: Service
) -> TokenPrompt:
    """The laid out text of messages and its token ids.

    The template is the model's own, never a request's. It runs in a sandbox, over lists whose
    length is limited, with ranges limited by Jinja, on a thread that its client waits for only so
    long.
    """
    if not 1 <= len(messages) <= service.limits.messages:
        raise ApiError(
            400,
            f"{len(messages)} messages; give 1 to {service.limits.messages}",
            param="messages",
        )
    service.check_text(
        "".join(
            part if isinstance(part, str) else "".join(p.text for p in part)
            for part in (message.content or "" for message in messages)
        ),
        "messages",
    )

    def render() -> TokenPrompt:
        tokenizer = service.tokenizer
        text = tokenizer.apply_chat_template(
            conversation(messages, tools, tokenizer, service.tools),
            tools=tools_for_template(tools, tokenizer),
            **options,
        )
        return text, tokenizer.encode(text, add_special_tokens=False)

    text, tokens = await service.pool.run(
        render, seconds=service.limits.template_seconds, task="laying out the messages"
    )
    if not tokens:
        raise ApiError(400, "the messages make an empty prompt", param="messages")
    return text, tokens


def _truncated(prompt: TokenPrompt, body: SamplingBody) -> TokenPrompt:
    """The last tokens of a prompt, as many as the request allows; their text is not known."""
    most = body.truncate_prompt_tokens
    return prompt if most is None or len(prompt[1]) <= most else (None, prompt[1][-most:])
