"""Response models of OpenAI's API, with the names of vLLM."""

from typing import Any, Literal

from pydantic import BaseModel

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of Prometheus' text format."""

type ChatFinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class PromptTokensDetails(BaseModel):
    """Prompt tokens served from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Generated tokens of reasoning."""

    reasoning_tokens: int


class UsageInfo(BaseModel):
    """Token counts of a request; a prompt with n samples counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobs(BaseModel):
    """Logprobs of /v1/completions."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionResponseChoice(BaseModel):
    """One generated text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionResponse(BaseModel):
    """Response of /v1/completions, or one chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseChoice]
    usage: UsageInfo | None = None


class TopLogprob(BaseModel):
    """An alternative token; ``bytes`` are its own, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A generated token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Logprobs of /v1/chat/completions."""

    content: list[TokenLogprob]
    refusal: None = None


class ResponseFunctionCall(BaseModel):
    """A function's name and its arguments as JSON."""

    name: str
    arguments: str


class ResponseToolCall(BaseModel):
    """One tool call."""

    id: str
    type: Literal["function"] = "function"
    function: ResponseFunctionCall


class DeltaFunctionCall(BaseModel):
    """Delta of a call's function: the name in the first one, then pieces of the arguments."""

    name: str | None = None
    arguments: str


class DeltaToolCall(BaseModel):
    """Delta of one tool call; only its first chunk has id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunctionCall


class ChatMessage(BaseModel):
    """The assistant's message; ``reasoning_content`` repeats ``reasoning`` for older clients.

    As in vLLM, fields of OpenAI's API without a value here are null.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ResponseToolCall] | None = None


class ChatCompletionResponseChoice(BaseModel):
    """One sample of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(BaseModel):
    """Response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    service_tier: None = None
    system_fingerprint: None = None
    usage: UsageInfo
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class DeltaMessage(BaseModel):
    """Delta of an assistant message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChatCompletionResponseStreamChoice(BaseModel):
    """Delta of one sample."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionStreamResponse(BaseModel):
    """One event of a stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatCompletionResponseStreamChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None


class ModelPermission(BaseModel):
    """Permissions of a model, as in vLLM."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(BaseModel):
    """An entry of /v1/models: ``root`` is the model's own name, ``parent`` an adapter's base
    model, ``max_model_len`` null while the server starts."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rjax"
    root: str
    parent: str | None = None
    max_model_len: int | None
    permission: list[ModelPermission]


def model_card(model: str, root: str, created: int, max_model_len: int | None) -> ModelCard:
    """The entry of a served model."""
    permission = ModelPermission(id=f"modelperm-{created:x}", created=created)
    return ModelCard(
        id=model, created=created, root=root, max_model_len=max_model_len, permission=[permission]
    )


class ModelList(BaseModel):
    """Response of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    """Response of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """Response of /detokenize."""

    prompt: str


class PrefixCard(BaseModel):
    """A named prefix."""

    name: str
    object: Literal["prefix"] = "prefix"
    num_tokens: int
    pinned: bool
    created: int


class PrefixList(BaseModel):
    """Response of GET /v1/prefixes."""

    object: Literal["list"] = "list"
    data: list[PrefixCard]


class VersionResponse(BaseModel):
    """Response of /version."""

    version: str


class LoadResponse(BaseModel):
    """Response of /load."""

    server_load: int


class EngineStatus(BaseModel):
    """Answer of the routes that pause and resume the engine."""

    status: Literal["paused", "resumed"]


class PausedStatus(BaseModel):
    """Answer of /is_paused."""

    is_paused: bool


class SleepingStatus(BaseModel):
    """Answer of /is_sleeping."""

    is_sleeping: bool


class HealthResponse(BaseModel):
    """Response of /health; ``compiled`` and ``of`` count programs while some are not compiled."""

    status: Literal["starting", "ready", "draining", "hung", "workers_hung", "dead"]
    compiled: int | None = None
    of: int | None = None


class DemoResponse(BaseModel):
    """Response of /page/demo: a system prompt and questions about it; empty for most models."""

    system_prompt: str = ""
    questions: list[str] = []


class ErrorInfo(BaseModel):
    """Message and code of an error."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorResponse(BaseModel):
    """Response of every failed request."""

    error: ErrorInfo
