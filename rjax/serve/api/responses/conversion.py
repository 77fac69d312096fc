"""Convert a Responses request to a chat request."""

from typing import Any

from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.requests import (
    ChatCompletionRequest,
    Function,
    FunctionCall,
    JsonSchema,
    Message,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    SharedSampling,
    StreamOptions,
    Tool,
    ToolCall,
)
from rjax.serve.protocol.responses_api_requests import (
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    NamedFunctionTool,
    ReasoningItem,
    Refusal,
    ResponsesRequest,
    TextFormat,
)
from rjax.tokenization.content_form import join_parts

LOGPROBS = "message.output_text.logprobs"
_SAME = (*SharedSampling.model_fields, "parallel_tool_calls")
_METADATA = (16, 64, 512)  # OpenAI's limits: entries, characters of a name, of a value
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format.schema",
    "logprobs": "top_logprobs",
}


def check_fields(body: ResponsesRequest) -> None:
    """Check the fields that a chat request does not have.

    Raises:
        ApiError: 400.
    """
    if body.user and body.safety_identifier not in (None, body.user):
        raise ApiError(
            400, "user and safety_identifier differ; give one of them", param="safety_identifier"
        )
    entries, key, value = _METADATA
    metadata = body.metadata or {}
    if len(metadata) > entries or any(len(k) > key or len(v) > value for k, v in metadata.items()):
        raise ApiError(
            400,
            f"metadata: give at most {entries} entries, with names of at most {key} and values of "
            f"at most {value} characters",
            param="metadata",
        )
    if body.background and body.store is False:
        raise ApiError(
            400,
            "background can only be used when `store` is true: the response is read from the store",
            param="background",
        )
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream set to true", param="stream_options")
    if body.top_logprobs and not wants_logprobs(body):
        raise ApiError(
            400, f"top_logprobs needs include to hold {LOGPROBS!r}", param="top_logprobs"
        )
    if wants_logprobs(body) and body.tools:
        raise ApiError(
            400,
            f"{LOGPROBS!r} cannot go with tools: the tokens of a call are no output text; use "
            "/v1/chat/completions",
            param="include",
        )


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Whether the request asks for logprobs of the output text."""
    return LOGPROBS in (body.include or ())


def chat_body(
    body: ResponsesRequest, messages: list[Message], *, knows_effort: bool
) -> ChatCompletionRequest:
    """The chat request of a Responses request.

    Args:
        body: body of the Responses request.
        messages: messages of the whole conversation, without the instructions.
        knows_effort: whether the chat template uses ``reasoning_effort``.

    Raises:
        ApiError: 400.
    """
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    kwargs = dict(body.chat_template_kwargs or {})
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort is not None:
        if not knows_effort:
            raise ApiError(
                400,
                "the chat template of this model knows no reasoning_effort; leave it out",
                param="reasoning.effort",
            )
        kwargs["reasoning_effort"] = effort
    if body.instructions is not None:
        messages = [Message(role="system", content=body.instructions), *messages]
    if wants_logprobs(body):
        values |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.stream:
        values |= {"stream": True, "stream_options": StreamOptions(include_usage=True)}
    wanted = None if body.text is None else body.text.format
    return ChatCompletionRequest(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        return_tokens_as_token_ids=False,
        response_format=None if wanted is None else _format(wanted),
        tools=None if body.tools is None else [_tool(tool.model_dump()) for tool in body.tools],
        tool_choice=NamedTool(type="function", function=NamedFunction(name=body.tool_choice.name))
        if isinstance(body.tool_choice, NamedFunctionTool)
        else body.tool_choice,
        user=body.user or body.safety_identifier,
        chat_template_kwargs=kwargs or None,
        **values,
    )


def input_messages(given: str | list[Item]) -> list[Message]:
    """Convert the input to chat messages.

    Reasoning, the text after it and the calls after that become one assistant message, as in a chat
    response.
    """
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    found: list[Message] = []
    for item in given:
        match item:
            case MessageItem(role="assistant") if _only_reasoned(found):
                found[-1].content = _text(item)
            case MessageItem():
                found.append(Message(role=item.role, content=_text(item)))
            case ReasoningItem():
                parts = item.content or item.summary or ()
                text = "".join(part.text for part in parts)
                if text:  # empty if the item has only encrypted reasoning
                    found.append(Message(role="assistant", reasoning=text))
            case FunctionCallItem():
                function = FunctionCall(name=item.name, arguments=item.arguments)
                call = ToolCall(id=item.call_id, function=function)
                if not found or found[-1].role != "assistant":
                    found.append(Message(role="assistant"))
                found[-1].tool_calls = [*(found[-1].tool_calls or ()), call]
            case FunctionOutputItem():
                output = item.output
                text = (
                    output if isinstance(output, str) else join_parts(part.text for part in output)
                )
                found.append(Message(role="tool", content=text, tool_call_id=item.call_id))
    return found


def _only_reasoned(messages: list[Message]) -> bool:
    """Whether the last message has only reasoning, without text or calls."""
    if not messages or messages[-1].reasoning is None:
        return False
    return messages[-1].content is None and not messages[-1].tool_calls


def renamed(error: ApiError) -> ApiError:
    """An error of a chat request with the field names of the Responses request."""
    name = _NAMES.get(error.param or "")
    if name is None:
        return error
    message = error.message
    if error.param in ("max_tokens", "max_completion_tokens", "response_format"):
        message = message.replace(error.param, name)
    return ApiError(error.status, message, code=error.code, param=name)


def _text(item: MessageItem) -> str:
    if isinstance(item.content, str):
        return item.content
    return join_parts(
        part.refusal if isinstance(part, Refusal) else part.text for part in item.content
    )


def _tool(fields: dict[str, Any]) -> Tool:
    del fields["type"]
    return Tool(type="function", function=Function(**fields))


def _format(wanted: TextFormat) -> ResponseFormat:
    if wanted.type != "json_schema":
        if wanted.model_fields_set - {"type"}:
            raise ApiError(
                400, f"text.format: the type {wanted.type} has no other field", param="text.format"
            )
        return ResponseFormat(type=wanted.type)
    if wanted.name is None or wanted.schema_ is None:
        raise ApiError(
            400, "text.format: the type json_schema needs name and schema", param="text.format"
        )
    fields = wanted.model_dump(by_alias=True, exclude={"type"})
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(**fields))
