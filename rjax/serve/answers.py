"""The bodies of answers, in the shape of OpenAI's API."""

from typing import Any, Literal

from pydantic import BaseModel

type Finish = Literal["stop", "length", "tool_calls", "abort", "error"]


class PromptTokensDetails(BaseModel):
    """Of the prompt tokens, those whose KV was there already."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Of the generated tokens, those of reasoning."""

    reasoning_tokens: int


class Usage(BaseModel):
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


class CompletionChoice(BaseModel):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionAnswer(BaseModel):
    """Answer, or one chunk of it, of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


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


class CalledFunction(BaseModel):
    """A function's name and its arguments as JSON."""

    name: str
    arguments: str


class CalledTool(BaseModel):
    """One call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionDelta(BaseModel):
    """What is new of a call's function: its name at first, then what follows of its arguments."""

    name: str | None = None
    arguments: str


class CalledToolDelta(BaseModel):
    """What is new of one call; id, type and name are in its first chunk alone."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class AnswerMessage(BaseModel):
    """The assistant's message; the reasoning has the names of newer and of older clients."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatAnswer(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Delta(BaseModel):
    """What is new."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledToolDelta] | None = None


class ChatChunkChoice(BaseModel):
    """What is new of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """One event of a stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
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


class Tokens(BaseModel):
    """Answer of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Text(BaseModel):
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


class Version(BaseModel):
    """Answer of /version."""

    version: str


class Load(BaseModel):
    """Answer of /load."""

    server_load: int


class HealthAnswer(BaseModel):
    """Answer of /health."""

    status: Literal["ready", "draining", "hung", "dead"]


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorAnswer(BaseModel):
    """Every answer that is no success."""

    error: ErrorBody
