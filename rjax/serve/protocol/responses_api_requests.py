"""The request model of POST /v1/responses. README.md documents each field."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from rjax.serve.protocol import refused_fields
from rjax.serve.protocol.fields import Refused
from rjax.serve.protocol.requests import (
    CallArguments,
    FailFastDict,
    FailFastList,
    Ignored,
    RefuseMedia,
    RequestModel,
    SharedSampling,
    TemplateKwargs,
)

type Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
type Status = Literal["in_progress", "completed", "incomplete"]


class InputText(RequestModel):
    """Text of the user or the system."""

    place: ClassVar[str] = "input.message.content."

    type: Literal["input_text"]
    text: str


class OutputText(RequestModel):
    """Text of an earlier response; OpenAI's client adds ``parsed``."""

    place: ClassVar[str] = "input.message.content."

    type: Literal["output_text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None


class Refusal(RequestModel):
    """A refusal of an earlier response."""

    place: ClassVar[str] = "input.message.content."

    type: Literal["refusal"]
    refusal: str


type Part = Annotated[InputText | OutputText | Refusal, Field(discriminator="type"), RefuseMedia]


class MessageItem(RequestModel):
    """A message."""

    place: ClassVar[str] = "input.message."

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | FailFastList[Part]
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class FunctionCallItem(RequestModel):
    """A function that the assistant called; OpenAI's client adds ``parsed_arguments``."""

    place: ClassVar[str] = "input.function_call."

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: CallArguments = "{}"
    id: Ignored = None
    status: Ignored = None
    parsed_arguments: Ignored = None


class FunctionOutputText(RequestModel):
    """A text of a function's result."""

    place: ClassVar[str] = "input.function_call_output.output."

    type: Literal["input_text"]
    text: str


class FunctionOutputItem(RequestModel):
    """The result of a called function."""

    place: ClassVar[str] = "input.function_call_output."

    type: Literal["function_call_output"]
    call_id: str
    output: str | FailFastList[Annotated[FunctionOutputText, RefuseMedia]]
    id: Ignored = None
    status: Ignored = None
    name: Ignored = None


class SummaryText(RequestModel):
    """A part of a summary of reasoning."""

    place: ClassVar[str] = "input.reasoning.summary."

    type: Literal["summary_text"]
    text: str


class ReasoningText(RequestModel):
    """A part of reasoning."""

    place: ClassVar[str] = "input.reasoning.content."

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(RequestModel):
    """Reasoning of an earlier response."""

    place: ClassVar[str] = "input.reasoning."

    type: Literal["reasoning"]
    summary: Annotated[
        FailFastList[SummaryText] | None, Field(description="used if there is no content")
    ] = None
    content: FailFastList[ReasoningText] | None = None
    id: Ignored = None
    status: Ignored = None
    encrypted_content: Ignored = None


def _item_type(item: Any) -> Any:
    if isinstance(item, RequestModel):
        return getattr(item, "type", None)
    if not isinstance(item, dict):
        return None
    found = item.get("type")
    if found is None:
        return "message"
    return found if isinstance(found, str) else None


type Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="unsupported_item",
        custom_error_message="the type of an item is message, function_call, "
        "function_call_output or reasoning; this server takes no other",
    ),
]


class FunctionTool(RequestModel):
    """A function that the model may call."""

    place: ClassVar[str] = "tools."

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="JSON schema")] = None
    strict: bool | None = None


class NamedFunctionTool(RequestModel):
    """A ``tool_choice`` that names a function."""

    place: ClassVar[str] = "tool_choice."

    type: Literal["function"]
    name: str


class TextFormat(RequestModel):
    """The required format of the text."""

    place: ClassVar[str] = "text.format."

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(RequestModel):
    """Options of the text."""

    place: ClassVar[str] = "text."

    format: TextFormat | None = None
    verbosity: Ignored = None


class Reasoning(RequestModel):
    """Options of reasoning."""

    place: ClassVar[str] = "reasoning."

    effort: Annotated[
        str | None, Field(description="for chat templates that use reasoning_effort")
    ] = None
    summary: Ignored = None
    generate_summary: Ignored = None


class ResponseStreamOptions(RequestModel):
    """Options of a stream."""

    place: ClassVar[str] = "stream_options."

    include_obfuscation: Ignored = None


class ResponsesRequest(SharedSampling):
    """Body of POST /v1/responses."""

    refused: ClassVar[Mapping[str, Refused]] = refused_fields.RESPONSES

    input: str | FailFastList[Item]
    instructions: Annotated[
        str | None, Field(description="a system message before all others, for this response only")
    ] = None
    previous_response_id: Annotated[
        str | None, Field(description="a stored response whose conversation is continued")
    ] = None
    store: Annotated[
        bool | None, Field(description="keep the response in memory; null is true")
    ] = None
    background: Annotated[
        bool | None,
        Field(description="return at once; get or cancel the stored response by its id"),
    ] = None
    text: TextOptions | None = None
    tools: FailFastList[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: at most one call")] = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: FailFastList[Includable] | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[FailFastDict[str] | None, Field(description="repeated in the response")] = (
        None
    )
    user: Annotated[str | None, Field(description="only logged")] = None
    safety_identifier: Annotated[str | None, Field(description="the newer name of user")] = None
    prompt_cache_key: Annotated[
        str | None, Field(description="repeated; prefixes share KV automatically without it")
    ] = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    service_tier: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    max_tool_calls: Ignored = None

    @field_validator("tools", "tool_choice", mode="before")
    @classmethod
    def _check_tools(cls, value: Any) -> Any:
        """Refuse built-in tools with their own error message."""
        for tool in value if isinstance(value, list) else [value]:
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind != "function":
                raise PydanticCustomError(
                    "unsupported_tool",
                    "this server has no {kind}; give functions, which the client runs",
                    {"kind": repr(kind[:64])},
                )
        return value
