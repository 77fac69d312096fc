"""The bodies of answers, in the shape of OpenAI's API."""

from typing import Any, Literal

from pydantic import BaseModel

type FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class PromptTokensDetails(BaseModel):
    """Of the prompt tokens, those whose KV was there already."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Of the generated tokens, those of reasoning."""

    reasoning_tokens: int


class UsageInfo(BaseModel):
    """Tokens of a request; a prompt with n samples counts once."""

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
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionResponse(BaseModel):
    """Answer, or one chunk of it, of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseChoice]
    usage: UsageInfo | None = None


class TopLogprob(BaseModel):
    """A token that could have stood there; ``bytes`` is null for a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer."""

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
    """One call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: ResponseFunctionCall


class DeltaFunctionCall(BaseModel):
    """What is new of a call's function: its name at first, then what follows of its arguments."""

    name: str | None = None
    arguments: str


class DeltaToolCall(BaseModel):
    """What is new of one call; id, type and name are in its first chunk alone."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunctionCall


class ChatMessage(BaseModel):
    """The assistant's message; the reasoning has the names of newer and of older clients."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[ResponseToolCall] | None = None


class ChatCompletionResponseChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class DeltaMessage(BaseModel):
    """What is new."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChatCompletionResponseStreamChoice(BaseModel):
    """What is new of one answer."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
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
    """What a client may do with a model, in the shape that clients of vLLM know."""

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
    """An entry of /v1/models: ``root`` is the model's own name, ``parent`` the one that an adapter
    adapts."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rjax"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    """Answer of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """Answer of /detokenize."""

    prompt: str


class PrefixCard(BaseModel):
    """A named prefix."""

    name: str
    object: Literal["prefix"] = "prefix"
    num_tokens: int
    pinned: bool
    created: int


class PrefixList(BaseModel):
    """Answer of GET /v1/prefixes."""

    object: Literal["list"] = "list"
    data: list[PrefixCard]


class VersionResponse(BaseModel):
    """Answer of /version."""

    version: str


class LoadResponse(BaseModel):
    """Answer of /load."""

    server_load: int


class HealthResponse(BaseModel):
    """Answer of /health."""

    status: Literal["ready", "draining", "hung", "dead"]


class ErrorInfo(BaseModel):
    """What went wrong."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorResponse(BaseModel):
    """Every answer that is no success."""

    error: ErrorInfo
