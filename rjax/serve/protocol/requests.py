"""Request models, with the names of vLLM. README.md documents each field."""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from rjax.serve.protocol import refused_fields
from rjax.serve.protocol.fields import Refused, known_fields
from rjax.tokenization.chat import MEDIA_PARTS, call_arguments


def _logprobs_flag(value: Any) -> Any:
    if type(value) is int and value not in (0, 1):
        raise PydanticCustomError("flag", "give true, and their number in top_logprobs")
    return value


def _arguments_text(value: Any) -> Any:
    """Accept what vLLM and Ollama do for the arguments of an earlier call: an object, no text, null
    as text, and JSON that was encoded twice. Other text stays as the model wrote it."""
    if isinstance(value, dict) or (isinstance(value, str) and value.lstrip()[:1] in ("", '"', "n")):
        found = call_arguments(value)
        return value if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    return value


def _in_parts(value: Any, validate: Callable[[Any], Any]) -> Any:
    """Validate a dict 64 entries at a time. `FailFast` is for dicts from pydantic 2.14 on only."""
    if not isinstance(value, dict):
        return validate(value)
    entries, found = iter(value.items()), {}
    while part := dict(itertools.islice(entries, 64)):
        found |= validate(part)
    return found


type Number = float | int
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
LogprobsFlag = Annotated[bool, BeforeValidator(_logprobs_flag)]
CallArguments = Annotated[
    str,
    BeforeValidator(_arguments_text),
    Field(description="JSON"),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]
# A field without effect, with any value.
Ignored = Annotated[Any, Field(exclude=True)]
# Validation stops early, because many errors would be expensive: at a list's first invalid entry,
# after the part of a dict that has one.
type FailFastList[T] = Annotated[list[T], FailFast()]
type FailFastDict[T] = Annotated[dict[str, T], WrapValidator(_in_parts)]
type TemplateKwargs = FailFastDict[str | bool | Number | None]


class RequestModel(BaseModel):
    """Base class of request bodies and their objects; null is an absent field.

    As in vLLM, texts and numbers that pydantic's lax mode converts are accepted: "5" and 5.0 for 5,
    "true" and 1 for true.

    `rjax.serve.protocol.fields.known_fields` handles unknown fields; the validation context is a
    `rjax.serve.protocol.fields.FieldCheck`. The number of errors of a body is bounded by its known
    fields and their types.

    Attributes:
        place: path of the object in the body, with a trailing dot; empty for the body itself.
        refused: unknown fields that may not be ignored.
        names: JSON names of the fields.
    """

    model_config = ConfigDict(extra="ignore")

    place: ClassVar[str] = ""
    refused: ClassVar[Mapping[str, Refused]] = {}
    names: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.names = frozenset(
            field.alias or name for name, field in cls.__pydantic_fields__.items()
        )

    @model_validator(mode="before")
    @classmethod
    def _read_fields(cls, value: Any, info: Any) -> Any:
        """Remove nulls and unknown fields. ``info`` is a ValidationInfo, a protocol that run-time
        type checkers cannot check."""
        if not isinstance(value, dict):
            return value
        return known_fields(value, cls.names, cls.refused, cls.place, info.context)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The JSON schema, in which every optional field may be null."""
        found = handler(core_schema)
        schema = handler.resolve_ref_schema(found)
        required = schema.get("required", ())
        for name, field in schema.get("properties", {}).items():
            if name not in required:
                schema["properties"][name] = _nullable(field)
        return found


def _nullable(schema: JsonSchemaValue) -> JsonSchemaValue:
    forms = schema.get("anyOf", [])
    if {"type": "null"} in forms or not schema.keys() & {"type", "$ref", "anyOf", "enum", "const"}:
        return schema
    notes = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    bare = {key: value for key, value in schema.items() if key not in notes}
    return {"anyOf": [*(forms or [bare]), {"type": "null"}], **notes}


class StreamOptions(RequestModel):
    """Options of a stream."""

    place: ClassVar[str] = "stream_options."

    include_usage: bool = False
    continuous_usage_stats: Annotated[
        bool, Field(description="with include_usage: every chunk holds the usage so far")
    ] = False
    include_obfuscation: Ignored = None


class JsonSchema(RequestModel):
    """The schema of a ``response_format``."""

    place: ClassVar[str] = "response_format.json_schema."

    name: str
    description: Ignored = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """The required format of the output."""

    place: ClassVar[str] = "response_format."
    refused: ClassVar[Mapping[str, Refused]] = refused_fields.RESPONSE_FORMAT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(RequestModel):
    """Constraint on the output text; exactly one field must be set."""

    place: ClassVar[str] = "structured_outputs."
    refused: ClassVar[Mapping[str, Refused]] = refused_fields.STRUCTURED_OUTPUTS

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: FailFastList[str] | None = None
    grammar: Annotated[str | None, Field(description="Lark or GBNF")] = None
    json_object: bool | None = None


class SharedSampling(RequestModel):
    """Fields that completions, chats and the Responses API share. Those of sampling have the names
    of `rjax.SamplingParams`."""

    model: Annotated[str | None, Field(description="must be the served model's name")] = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    seed: Seed | None = None
    stop: str | FailFastList[str] | None = None
    stop_token_ids: FailFastList[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: FailFastDict[Number] | None = None
    allowed_token_ids: FailFastList[int] | None = None
    bad_words: FailFastList[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    logprobs_mode: Annotated[
        str | None,
        Field(
            description="raw_logprobs or processed_logprobs, those of the distribution that is "
            "sampled from; default: --logprobs-mode"
        ),
    ] = None
    priority: Annotated[
        int | None, Field(description="smaller runs earlier, among requests of one API key")
    ] = None
    cache_salt: Annotated[
        str | None, Field(description="only prompts with the same salt share cached KV")
    ] = None


class SamplingRequest(SharedSampling):
    """Fields of both completion routes."""

    refused: ClassVar[Mapping[str, Refused]] = refused_fields.SAMPLING

    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: Annotated[
        int | None,
        Field(description="newer name of max_tokens; if both are set, they must agree"),
    ] = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: Annotated[bool, Field(description="add token ids to the response")] = False
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(
            description="keep only this many tokens at the end of each prompt; -1: as many as fit"
        ),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None,
        Field(
            description="logprobs contain token_id:N instead of a token's text; default: "
            "--return-tokens-as-token-ids"
        ),
    ] = None
    use_beam_search: Annotated[
        bool | None, Field(description="return the n most likely texts, by beam search")
    ] = None
    length_penalty: Annotated[
        Number | None, Field(description="of a beam search; above 1 favours long texts")
    ] = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str | None, Field(description="only logged")] = None
    store: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None


class CompletionRequest(SamplingRequest):
    """Body of POST /v1/completions."""

    refused: ClassVar[Mapping[str, Refused]] = refused_fields.COMPLETION

    prompt: str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]]
    prefix: Annotated[str | None, Field(description="a named prefix that precedes each prompt")] = (
        None
    )
    best_of: Annotated[
        int | None, Field(description="samples to generate; the n most likely are returned")
    ] = None
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: Annotated[
        bool | None,
        Field(
            description="add the BOS token to text prompts; default: unless one has it or prefix"
        ),
    ] = None


def refuse_media(part: Any) -> Any:
    """Refuse a content part that holds an image, audio, video or a file."""
    kind = part.get("type") if isinstance(part, dict) else None
    media = MEDIA_PARTS.get(kind) if isinstance(kind, str) else None
    if media is not None:
        context = {"type": kind, "media": media}
        raise PydanticCustomError("media_part", "'{type}', {media}", context)
    return part


class TextPart(RequestModel):
    """A content part of a message; only text is supported."""

    place: ClassVar[str] = "messages.content."
    refused: ClassVar[Mapping[str, Refused]] = refused_fields.PART

    type: Literal["text"]
    text: str


RefuseMedia = BeforeValidator(refuse_media)


class FunctionCall(RequestModel):
    """A function that the assistant called."""

    place: ClassVar[str] = "messages.tool_calls.function."

    name: str
    arguments: CallArguments = "{}"


class ToolCall(RequestModel):
    """One tool call of an assistant message."""

    place: ClassVar[str] = "messages.tool_calls."

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(RequestModel):
    """One message; the ignored fields are those of responses that clients send back."""

    place: ClassVar[str] = "messages."
    refused: ClassVar[Mapping[str, Refused]] = refused_fields.MESSAGE

    role: Annotated[str, Field(description="one that the chat template takes")]
    content: str | FailFastList[Annotated[TextPart, RefuseMedia]] | None = None
    name: str | None = None
    tool_calls: FailFastList[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Annotated[str | None, Field(description="used if there is no content")] = None
    reasoning: Annotated[str | None, Field(description="of an assistant message")] = None
    reasoning_content: Annotated[
        str | None, Field(description="older name of reasoning; if both are set, they must agree")
    ] = None
    annotations: Ignored = None
    provider_specific_fields: Ignored = None


class Function(RequestModel):
    """A function that the model may call."""

    place: ClassVar[str] = "tools.function."

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="JSON schema")] = None
    strict: bool | None = None


class Tool(RequestModel):
    """An entry of ``tools``."""

    place: ClassVar[str] = "tools."

    type: Literal["function"]
    function: Function


class NamedFunction(RequestModel):
    """The function that must be called."""

    place: ClassVar[str] = "tool_choice.function."

    name: str


class NamedTool(RequestModel):
    """A ``tool_choice`` that names a function."""

    place: ClassVar[str] = "tool_choice."

    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(SamplingRequest):
    """Body of POST /v1/chat/completions."""

    refused: ClassVar[Mapping[str, Refused]] = refused_fields.CHAT

    messages: FailFastList[Message]
    logprobs: LogprobsFlag | None = None
    top_logprobs: int | None = None
    tools: FailFastList[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: at most one call")] = None
    echo: Annotated[bool, Field(description="repeat the last message if it is the assistant's")] = (
        False
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: Annotated[
        bool, Field(description="add the BOS token to the template's output")
    ] = False
    chat_template_kwargs: TemplateKwargs | None = None
    modalities: FailFastList[Literal["text"]] | None = None
    prediction: Ignored = None
    verbosity: Ignored = None


class TokenizeRequest(RequestModel):
    """Body of POST /tokenize: a prompt or messages."""

    refused: ClassVar[Mapping[str, Refused]] = refused_fields.TOKENIZE

    model: str | None = None
    prompt: Annotated[
        str | FailFastList[Message] | None, Field(description="a list is read as messages")
    ] = None
    messages: FailFastList[Message] | None = None
    tools: Annotated[FailFastList[Tool] | None, Field(description="only with messages")] = None
    add_special_tokens: Annotated[
        bool | None,
        Field(description="add the BOS token; default: true for a prompt, false for messages"),
    ] = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: FailFastList[int]


class PrefixRequest(RequestModel):
    """Body of POST /v1/prefixes: the prefix is given as either prompt or messages."""

    refused: ClassVar[Mapping[str, Refused]] = refused_fields.PREFIX

    name: str
    prompt: str | FailFastList[int] | None = None
    messages: FailFastList[Message] | None = None
    cache_salt: Annotated[
        str | None, Field(description="cache_salt of the requests that use the prefix")
    ] = None
    pin: Annotated[bool, Field(description="keep its KV in memory until it is dropped")] = True


class PinRequest(RequestModel):
    """Body of PATCH /v1/prefixes/{name}."""

    pin: bool
