"""Models of responses, output items and stream events, with the names of OpenAI and vLLM."""

from typing import Any, Literal

from pydantic import BaseModel

from rjax.serve.protocol.responses_api_requests import Status


class TopTextLogprob(BaseModel):
    """An alternative token; ``bytes`` is empty for an incomplete UTF-8 character."""

    token: str
    logprob: float
    bytes: list[int]


class TextLogprob(TopTextLogprob):
    """A token of the text."""

    top_logprobs: list[TopTextLogprob]


class ResponseOutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TextLogprob] = []


class ResponseReasoningText(BaseModel):
    """The text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ResponseReasoningItem(BaseModel):
    """The assistant's reasoning; ``summary`` is always empty."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    summary: list[Any] = []
    content: list[ResponseReasoningText]
    status: Status


class ResponseOutputMessage(BaseModel):
    """A message of the assistant."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[ResponseOutputText]


class ResponseFunctionToolCall(BaseModel):
    """A call of a function."""

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str
    status: Status


type ResponseOutputItem = ResponseReasoningItem | ResponseOutputMessage | ResponseFunctionToolCall


class InputTokensDetails(BaseModel):
    """Input tokens served from the prefix cache, and those computed and written to it."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """Output tokens of reasoning."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponsesResponse(BaseModel):
    """A response, including the request's parameters with their defaults."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[ResponseOutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(BaseModel):
    """Response of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class StreamEvent(BaseModel):
    """One event of a stream; ``sequence_number`` counts from 0."""

    type: str
    sequence_number: int


class ResponseEvent(StreamEvent):
    """Start or end of a response."""

    response: ResponsesResponse


class ItemEvent(StreamEvent):
    """Start or end of an output item."""

    output_index: int
    item: ResponseOutputItem


class _ItemEvent(StreamEvent):
    item_id: str
    output_index: int


class PartEvent(_ItemEvent):
    """Start or end of a content part of a message or of reasoning."""

    content_index: int = 0
    part: ResponseOutputText | ResponseReasoningText


class TextDeltaEvent(_ItemEvent):
    """Delta of a text."""

    content_index: int = 0
    delta: str
    logprobs: list[TextLogprob]


class TextDoneEvent(_ItemEvent):
    """A complete text."""

    content_index: int = 0
    text: str
    logprobs: list[TextLogprob]


class ReasoningDeltaEvent(_ItemEvent):
    """Delta of reasoning."""

    content_index: int = 0
    delta: str


class ReasoningDoneEvent(_ItemEvent):
    """Complete reasoning."""

    content_index: int = 0
    text: str


class ArgumentsDeltaEvent(_ItemEvent):
    """Delta of a call's arguments."""

    delta: str


class ArgumentsDoneEvent(_ItemEvent):
    """Complete arguments of a call."""

    name: str
    arguments: str
