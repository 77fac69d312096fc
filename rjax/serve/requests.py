"""The bodies of requests. A field that is not listed here is refused, never ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

type Number = float | int
# Checks stop at a list's first bad entry: an error for every entry costs far more than the entries.
type Listed[T] = Annotated[list[T], FailFast()]
type Mapped[T] = Annotated[dict[str, T], FailFast()]


class Body(BaseModel):
    """Base of all bodies: exact types, no unknown fields.

    The errors of one body are at most as many as it has fields, times the forms of each.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        """Refuse more fields than there are before each unknown one becomes an error."""
        if isinstance(value, dict) and len(value) > len(cls.__pydantic_fields__):
            raise PydanticCustomError(
                "too_many_fields",
                "there are {count} fields, more than the {known} that are known",
                {"count": len(value), "known": len(cls.__pydantic_fields__)},
            )
        return value


class StreamOptions(Body):
    """What a stream adds."""

    include_usage: bool = False


class StructuredOutputs(Body):
    """What the text must match: exactly one of these."""

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: Annotated[str | None, Field(description="Lark or GBNF")] = None
    json_object: bool | None = None


class SamplingBody(Body):
    """Fields of both completion routes; names and meaning as in `rjax.SamplingParams`."""

    model: Annotated[str | None, Field(description="must be the served model's name")] = None
    n: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    seed: int | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Mapped[Number] | None = None
    allowed_token_ids: Listed[int] | None = None
    bad_words: Listed[str] | None = None
    priority: Annotated[int | None, Field(description="smaller runs earlier")] = None
    cache_salt: Annotated[
        str | None, Field(description="only prompts with the same salt share cached KV")
    ] = None
    return_token_ids: Annotated[bool, Field(description="add token ids to the answer")] = False
    truncate_prompt_tokens: Annotated[
        int | None, Field(description="keep only so many tokens of each prompt, its last ones")
    ] = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str | None, Field(description="goes into the log, nowhere else")] = None


class CompletionBody(SamplingBody):
    """Body of POST /v1/completions."""

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    prefix: Annotated[
        str | None, Field(description="a named prefix whose tokens stand before each prompt's")
    ] = None
    best_of: Annotated[
        int | None, Field(description="samples to generate; the n likeliest are given back")
    ] = None
    logprobs: int | None = None
    echo: bool = False


class TextPart(Body):
    """A part of a message; only text is read."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """A function that the assistant called."""

    name: str
    arguments: Annotated[str, Field(description="JSON")]


class ToolCall(Body):
    """One call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message; the last five are what the official client sends back of an answer."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Listed[TextPart] | None = None
    name: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="JSON schema")] = None
    strict: bool | None = None


class Tool(Body):
    """An entry of ``tools``."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The function that must be called."""

    name: str


class NamedTool(Body):
    """A ``tool_choice`` that names a function."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """The schema of a ``response_format``."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(SamplingBody):
    """Body of POST /v1/chat/completions."""

    messages: Listed[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Listed[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapped[str | bool | Number | None] | None = None


class TokenizeBody(Body):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Listed[int]


class PrefixBody(Body):
    """Body of POST /v1/prefixes: prompt or messages, one of them, says what the prefix is."""

    name: str
    prompt: str | Listed[int] | None = None
    messages: Listed[Message] | None = None
    cache_salt: Annotated[
        str | None, Field(description="that of the requests which are to find it")
    ] = None
    pin: Annotated[bool, Field(description="keep it in memory until it is dropped")] = True


class PinBody(Body):
    """Body of PATCH /v1/prefixes/{name}."""

    pin: bool
