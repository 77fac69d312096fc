"""POST /v1/chat/completions."""

import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from rjax.outputs import CompletionOutput, RequestOutput
from rjax.sampling import SamplingParams
from rjax.serve.auth import Tenant
from rjax.serve.beam_search import check_beam_search, request_group
from rjax.serve.chunked_json import chunked_response, response_size
from rjax.serve.completions import (
    UsageCounter,
    continuous_usage,
    stream_error,
    tokens_as_token_ids,
    usage_wanted,
)
from rjax.serve.disconnect import cancel_on_disconnect
from rjax.serve.errors import ApiError
from rjax.serve.event_stream import EventStream
from rjax.serve.logprobs import chat_logprobs, prompt_logprobs, within_logprobs_limit
from rjax.serve.prompts import chat_prompt, kept_tokens
from rjax.serve.reasoning import OutputReader
from rjax.serve.request_group import RequestGroup
from rjax.serve.requests import ChatCompletionRequest, NamedTool, Tool
from rjax.serve.responses import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatLogprobs,
    ChatMessage,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FinishReason,
    ResponseFunctionCall,
    ResponseToolCall,
    UsageInfo,
)
from rjax.serve.sampling import chat_params, check_constrained, max_tokens, request_constraint
from rjax.serve.service import Service
from rjax.serve.structured_outputs import check_schema, text_constraint
from rjax.serve.tenancy import engine_options
from rjax.serve.tools.base import functions
from rjax.serve.tools.parser import CallDelta, join_call_deltas
from rjax.serve.tools.prompt import message_text
from rjax.structured.constraint import Constraint


async def chat(
    body: ChatCompletionRequest, request: Request, tenant: Tenant, service: Service
) -> Response:
    """Answer a chat request."""
    run = await prepare_chat(body, tenant, service)
    if body.stream:
        await run.start()
        return EventStream(_events(run), run.close)
    output = await run.final(request)
    size = response_size([output], run.params)
    return await chunked_response(lambda: run.response(output), size, service.response_threads)


async def prepare_chat(
    body: ChatCompletionRequest, tenant: Tenant, service: Service, *, answer_logprobs: bool = False
) -> "ChatRun":
    """Check a chat request and render its prompt, without submitting it.

    Args:
        body: of the request.
        tenant: of the client.
        service: of the app.
        answer_logprobs: give logprobs only of the content's tokens, not of those of reasoning and
            markers.

    Raises:
        ApiError, InvalidRequestError, OverloadedError.
    """
    service.check_model(body.model)
    tools = _tools(body, service)
    check_beam_search(body)
    params = chat_params(body, service.defaults, service.limits, service.alternatives)
    constraint, of_calls = _constraint(body, tools, service)
    if constraint is not None:
        check_constrained(params)
    if service.output_format.shows_special_tokens(bool(tools)):
        params = dataclasses.replace(params, skip_special_tokens=False)
    last = kept_tokens(body, params.max_tokens, service)
    prompt = await chat_prompt(body, tools, last, tenant, service)
    start = _start(body, prompt[1], service)
    if constraint is not None:
        constraint = service.output_format.after_reasoning(constraint, start, calls=of_calls)
    params = within_logprobs_limit(
        params,
        [len(prompt[1])],
        service.max_model_len,
        service.limits.request_logprobs,
        max_tokens_given=max_tokens(body) is not None,
    )
    group = request_group(body, service, params)
    options = {"tenant": tenant.name, **engine_options(body, tenant, service.limits)}
    builder = _ResponseBuilder(
        body, service, params, tools, prompt[1], start, answer_logprobs=answer_logprobs
    )
    return ChatRun(params, group, builder, lambda: group.start([prompt], constraint, **options))


class ChatRun:
    """A chat request that is ready to run, for the routes of chats and of the Responses API.

    Args:
        params: of its samples.
        running: its prompt in the engine.
        builder: converts its outputs to responses and chunks.
        start: submits the prompt.
    """

    def __init__(
        self,
        params: SamplingParams,
        group: RequestGroup,
        builder: "_ResponseBuilder",
        start: Callable[[], Awaitable[None]],
    ) -> None:
        self.params = params
        self._group = group
        self._builder = builder
        self._start = start

    async def start(self) -> None:
        """Submit the prompt.

        Raises:
            ApiError, InvalidRequestError, OverloadedError, EngineDeadError.
        """
        await self._start()

    def chunks(self) -> AsyncIterator[ChatCompletionStreamResponse]:
        """The chunks of a started stream, and the usage if requested.

        Raises:
            ApiError: a sample ended on an error.
        """
        return self._builder.chunks(self._group)

    async def final(self, request: Request) -> RequestOutput:
        """Run to the end and return the last output; aborts if the client disconnects.

        Raises:
            ApiError, InvalidRequestError, OverloadedError, EngineDeadError.
        """

        async def whole() -> RequestOutput:
            await self._start()
            return await self.output()

        try:
            return await cancel_on_disconnect(request, whole())
        finally:
            self.close()

    async def output(self) -> RequestOutput:
        """The last output of a started run that does not stream.

        Raises:
            ApiError: a sample ended on an error.
        """
        (output,) = await self._group.finals()
        return output

    def response(self, output: RequestOutput) -> ChatCompletionResponse:
        """The response, from the last output."""
        return self._builder.whole(output)

    def close(self) -> None:
        """Abort an unfinished run."""
        self._group.close()


async def _events(run: ChatRun) -> AsyncIterator[str]:
    """The data of each event of a stream; chunks contain all fields that were set, even to null."""
    try:
        async for chunk in run.chunks():
            yield chunk.model_dump_json(exclude_unset=True)
        yield "[DONE]"
    except Exception as error:
        yield stream_error(error)


def _tools(body: ChatCompletionRequest, service: Service) -> list[Tool]:
    """The functions that the model may call.

    Raises:
        ApiError: 400, too many functions, a duplicate name, or an invalid ``tool_choice``.
    """
    tools = body.tools or []
    choice = body.tool_choice
    if len(tools) > service.limits.tools:
        raise ApiError(
            400,
            f"tools has {len(tools)} entries; give at most {service.limits.tools}",
            param="tools",
        )
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise ApiError(400, "two tools have the same name", param="tools")
    if not tools and choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise ApiError(
                400,
                f"tool_choice names {choice.function.name[:100]!r}, which is not among the tools",
                param="tool_choice",
            )
    return [] if choice == "none" else tools


def _forced(body: ChatCompletionRequest) -> bool:
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def _constraint(
    body: ChatCompletionRequest, tools: list[Tool], service: Service
) -> tuple[Constraint | None, bool]:
    """The constraint on the output after its reasoning, and whether it is a tool-call grammar."""
    literal = service.literal_json_schemas
    found = request_constraint(body, service.limits, literal=literal)
    forced = _forced(body)
    single = body.parallel_tool_calls is False
    strict = any(tool.function.strict for tool in tools)
    if not forced and not strict and (found is not None or not single or not tools):
        return found, False
    if found is not None:
        raise ApiError(
            400,
            "structured output excludes forced tool calls and strict functions; leave out one of "
            "them",
            param="tool_choice" if forced else "tools",
        )
    for i, tool in enumerate(tools):
        if tool.function.parameters is not None and (forced or tool.function.strict):
            check_schema(tool.function.parameters, service.limits, f"tools.{i}.parameters")
    several = not single and not isinstance(body.tool_choice, NamedTool)
    fmt = service.output_format
    make = fmt.calls_grammar if forced else fmt.text_or_calls_grammar
    grammar = make(tools, several=several, literal=literal)
    return text_constraint("grammar", grammar, service.limits, "tools"), True


def _start(body: ChatCompletionRequest, token_ids: list[int], service: Service) -> str:
    """The start state of the output after this prompt; see `OutputFormat`."""
    continued = None
    if body.continue_final_message:
        continued = message_text(body.messages[-1])
    last = service.output_format.prompt_tokens
    tail = service.tokenizer.decode(token_ids[-last:], skip_special_tokens=False) if last else ""
    return service.output_format.start(tail, continued)


class _ResponseBuilder:
    """Converts engine outputs to responses and stream chunks."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        service: Service,
        params: SamplingParams,
        tools: list[Tool],
        prompt_token_ids: list[int],
        start: str,
        *,
        answer_logprobs: bool,
    ) -> None:
        self._body = body
        self._params = params
        self._as_token_ids = tokens_as_token_ids(body, service)
        self._token_bytes = service.tokenizer.token_bytes
        given = start, functions(tools), service.tokenizer, prompt_token_ids, params
        self._answer_logprobs = answer_logprobs and service.output_format.reasons
        self._readers = [
            OutputReader(service.output_format, *given, every_token=self._answer_logprobs)
            for _ in range(params.n)
        ]
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.model,
        }
        self._echoed = message_text(body.messages[-1]) if _echoes(body) else ""
        self._count = UsageCounter()

    def whole(self, output: RequestOutput) -> ChatCompletionResponse:
        """The response, from the last output."""
        self._count.add(0, output)
        body = self._body
        return ChatCompletionResponse(
            **self._head,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=self._usage(),
            prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
        )

    def _choice(self, completion: CompletionOutput) -> ChatCompletionResponseChoice:
        found = self._readers[completion.index].read(completion)
        made = [
            ResponseToolCall(
                id=call.id, function=ResponseFunctionCall(name=call.name, arguments=call.arguments)
            )
            for call in join_call_deltas(found.calls)
        ]
        reason = completion.finish_reason
        assert reason is not None
        content = self._echoed + found.content
        return ChatCompletionResponseChoice(
            index=completion.index,
            message=ChatMessage(
                content=content if content.strip() or not (made or found.reasoning) else None,
                reasoning=found.reasoning or None,
                reasoning_content=found.reasoning or None,
                tool_calls=made or None,
            ),
            logprobs=self._logprobs(completion),
            finish_reason=self._reason(completion),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._body.return_token_ids else None,
        )

    async def chunks(self, group: RequestGroup) -> AsyncIterator[ChatCompletionStreamResponse]:
        """The chunks of a stream, and the usage if requested."""
        begun: set[int] = set()
        ended: set[int] = set()
        async for _, output in group.outputs():
            self._count.add_prompt(0, output)
            for index in (completion.index for completion in output.outputs):
                if index not in begun:
                    tokens = output.prompt_token_ids if not begun else None
                    begun.add(index)
                    yield self._first_chunk(index, tokens)
            self._count.add(0, output)
            for completion in output.outputs:
                index = completion.index
                if index in ended:
                    continue
                if completion.finish_reason is not None:
                    ended.add(index)
                for chunk in self._delta_chunks(completion):
                    yield chunk
        if usage_wanted(self._body):
            chunk = self._make_chunk([])
            chunk.usage = self._usage()
            yield chunk

    def _delta_chunks(self, completion: CompletionOutput) -> list[ChatCompletionStreamResponse]:
        """The chunks of one sample's delta: reasoning, content, tool calls, then finish reason."""
        index = completion.index
        ended = completion.finish_reason is not None
        found = self._readers[index].read(completion)
        deltas = []
        if found.reasoning:
            deltas.append(
                DeltaMessage(reasoning=found.reasoning, reasoning_content=found.reasoning)
            )
        if found.content:
            deltas.append(DeltaMessage(content=found.content))
        logprobs = self._logprobs(completion)
        tokens = completion.token_ids if self._body.return_token_ids else None
        more: dict[str, Any] = {"logprobs": logprobs}
        if tokens is not None:
            more["token_ids"] = tokens
        if completion.token_ids and not deltas and (logprobs is not None or tokens is not None):
            deltas.append(DeltaMessage(content=""))
        chunks = []
        # One chunk reports the tokens: the first, or that of the content if they are the content's.
        reporting = len(deltas) - 1 if self._answer_logprobs else 0
        for i, delta in enumerate(deltas):
            chunks.append(self._chunk(index, delta, **(more if i == reporting else {})))
        chunks += [
            self._chunk(index, DeltaMessage(tool_calls=[_delta_tool_call(piece)]))
            for piece in found.calls
        ]
        if ended:
            more = {"finish_reason": self._reason(completion)}
            if completion.stop_reason is not None:
                more["stop_reason"] = completion.stop_reason
            chunks.append(self._chunk(index, DeltaMessage(), **more))
        return chunks

    def _first_chunk(
        self, index: int, prompt_token_ids: list[int] | None
    ) -> ChatCompletionStreamResponse:
        chunk = self._chunk(index, DeltaMessage(role="assistant", content=self._echoed))
        if self._body.return_token_ids and prompt_token_ids is not None:
            chunk.prompt_token_ids = prompt_token_ids
        return chunk

    def _chunk(self, index: int, delta: DeltaMessage, **more: Any) -> ChatCompletionStreamResponse:
        choice = ChatCompletionResponseStreamChoice(
            index=index, delta=delta, **({"logprobs": None, "finish_reason": None} | more)
        )
        chunk = self._make_chunk([choice])
        if continuous_usage(self._body):
            chunk.usage = self._usage()
        return chunk

    def _make_chunk(
        self, choices: list[ChatCompletionResponseStreamChoice]
    ) -> ChatCompletionStreamResponse:
        return ChatCompletionStreamResponse(
            **self._head, object="chat.completion.chunk", choices=choices
        )

    def _usage(self) -> UsageInfo:
        return self._count.usage(sum(reader.count_reasoning() for reader in self._readers))

    def _reason(self, completion: CompletionOutput) -> FinishReason:
        reason = completion.finish_reason
        assert reason is not None
        called = self._readers[completion.index].num_calls > 0
        return "tool_calls" if reason == "stop" and called else reason

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        tokens, entries = completion.token_ids, completion.logprobs
        if self._answer_logprobs:
            tokens, entries = self._readers[completion.index].answer_logprobs(completion)
        return chat_logprobs(
            tokens,
            entries,
            self._params.logprobs or 0,
            self._token_bytes,
            as_token_ids=self._as_token_ids,
        )


def _echoes(body: ChatCompletionRequest) -> bool:
    return body.echo and body.messages[-1].role == "assistant"


def _delta_tool_call(piece: CallDelta) -> DeltaToolCall:
    if piece.id is None:
        function = DeltaFunctionCall(arguments=piece.arguments)
        return DeltaToolCall(index=piece.index, function=function)
    function = DeltaFunctionCall(name=piece.name, arguments=piece.arguments)
    return DeltaToolCall(index=piece.index, id=piece.id, type="function", function=function)
