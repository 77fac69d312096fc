"""POST /v1/chat/completions."""

import dataclasses
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from rjax.outputs import CompletionOutput, RequestOutput
from rjax.sampling import SamplingParams
from rjax.serve.answers import (
    AnswerMessage,
    CalledFunction,
    CalledTool,
    CalledToolDelta,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    Delta,
    Finish,
    FunctionDelta,
)
from rjax.serve.auth import Tenant
from rjax.serve.completions import UsageCount, stream_error
from rjax.serve.errors import ApiError
from rjax.serve.logprobs import chat_logprobs, check_amount, prompt_logprobs
from rjax.serve.masks import Constraint, json_constraint, text_constraint
from rjax.serve.pieces import answer_size, pieced
from rjax.serve.prompts import chat_prompt
from rjax.serve.requests import ChatBody, NamedTool, Tool
from rjax.serve.running import EventStream, Running, unless_disconnected
from rjax.serve.sampling import chat_params, check_constrained, constraint_of
from rjax.serve.service import Service
from rjax.serve.tenancy import engine_options
from rjax.serve.tools import CallPiece, CallReader, join_pieces


async def chat(body: ChatBody, request: Request, tenant: Tenant, service: Service) -> Response:
    """Answer a chat request."""
    service.check_model(body.model)
    tools = _tools(body, service)
    params = chat_params(body, service.defaults, service.limits)
    constraint = _constraint(body, tools, service)
    if constraint is not None:
        check_constrained(params)
    if tools:
        # The tags of a call may be special tokens.
        params = dataclasses.replace(params, skip_special_tokens=False)
    prompt = await chat_prompt(body, tools, tenant, service)
    lengths = [len(prompt[1])]
    check_amount(params, lengths, service.max_model_len, service.limits.request_logprobs)
    running = Running(service, params)
    answer = _Answer(body, service, params, tools)
    options = engine_options(body, tenant, service.limits)
    if body.stream:
        await running.start([prompt], constraint, tenant=tenant.name, **options)
        return EventStream(answer.events(running), running.close)

    async def whole() -> list[RequestOutput]:
        await running.start([prompt], constraint, tenant=tenant.name, **options)
        return await running.finals()

    try:
        outputs = await unless_disconnected(request, whole())
    finally:
        running.close()
    size = answer_size(outputs, params)
    return await pieced(lambda: answer.whole(outputs[0]), size, service.answer_threads)


def _tools(body: ChatBody, service: Service) -> list[Tool]:
    """The functions that this request's model may call.

    Raises:
        ApiError: 400, too many, two of one name, or a choice that they do not allow.
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
    forced = _forced(body)
    if not forced and any(tool.function.strict for tool in tools):
        raise ApiError(
            400,
            "strict functions need a tool_choice that forces a call (required, or a name)",
            param="tools",
        )
    if not forced and body.parallel_tool_calls is False and tools and choice != "none":
        raise ApiError(
            400,
            "parallel_tool_calls false needs a tool_choice that forces a call",
            param="parallel_tool_calls",
        )
    return [] if choice == "none" else tools


def _forced(body: ChatBody) -> bool:
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def _constraint(body: ChatBody, tools: list[Tool], service: Service) -> Constraint | None:
    found = constraint_of(body, service.limits)
    if not _forced(body):
        return found
    if found is not None:
        raise ApiError(
            400, "a forced tool call and structured output exclude each other", param="tool_choice"
        )
    several = body.tool_choice == "required" and body.parallel_tool_calls is not False
    for i, tool in enumerate(tools):
        if tool.function.parameters is not None:
            # The limits of a schema hold for each function's.
            json_constraint(tool.function.parameters, service.limits, f"tools.{i}.parameters")
    grammar = service.tools.grammar(tools, several=several)
    return text_constraint("grammar", grammar, service.limits, "tools")


class _Answer:
    """Turns outputs into answers and chunks."""

    def __init__(
        self, body: ChatBody, service: Service, params: SamplingParams, tools: list[Tool]
    ) -> None:
        self._body = body
        self._params = params
        names = frozenset(tool.function.name for tool in tools)
        self._readers = [
            CallReader(service.tools, names) if tools else None for _ in range(params.n)
        ]
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.model,
        }
        self._count = UsageCount()

    def whole(self, output: RequestOutput) -> ChatAnswer:
        """The answer, from the last output."""
        self._count.add(0, output)
        body = self._body
        return ChatAnswer(
            **self._head,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=self._count.usage(),
            prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
        )

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        content, pieces = self._read(completion.index, completion.text, ended=True)
        made = [
            CalledTool(
                id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments)
            )
            for call in join_pieces(pieces)
        ]
        reason = completion.finish_reason
        assert reason is not None
        return ChatChoice(
            index=completion.index,
            message=AnswerMessage(
                content=None if made and not content.strip() else content, tool_calls=made or None
            ),
            logprobs=self._logprobs(completion),
            finish_reason=self._reason(completion),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._body.return_token_ids else None,
        )

    async def events(self, running: Running) -> AsyncIterator[str]:
        """The chunks as they come, the usage if wanted, and the end."""
        begun: set[int] = set()
        ended: set[int] = set()
        try:
            async for _, output in running.outputs():
                self._count.add(0, output)
                for completion in output.outputs:
                    index = completion.index
                    if index in ended:
                        continue
                    if index not in begun:
                        begun.add(index)
                        yield self._chunk(index, Delta(role="assistant", content=""))
                    if completion.finish_reason is not None:
                        ended.add(index)
                    for chunk in self._news(completion):
                        yield chunk
            if self._body.stream_options is not None and self._body.stream_options.include_usage:
                chunk = ChatChunk(**self._head, choices=[], usage=self._count.usage())
                yield chunk.model_dump_json()
            yield "[DONE]"
        except Exception as error:
            yield stream_error(error)

    def _news(self, completion: CompletionOutput) -> list[str]:
        """The chunks of one sample's news: content, then pieces of calls, then the end."""
        index = completion.index
        ended = completion.finish_reason is not None
        content, pieces = self._read(index, completion.text, ended=ended)
        chunks = []
        logprobs = self._logprobs(completion)
        tokens = completion.token_ids if self._body.return_token_ids else None
        if content or (completion.token_ids and (logprobs is not None or tokens is not None)):
            delta = Delta(content=content)
            chunks.append(self._chunk(index, delta, logprobs=logprobs, token_ids=tokens))
        chunks += [self._chunk(index, Delta(tool_calls=[_news_of(piece)])) for piece in pieces]
        if ended:
            reason, stop = self._reason(completion), completion.stop_reason
            chunks.append(self._chunk(index, Delta(), finish_reason=reason, stop_reason=stop))
        return chunks

    def _chunk(self, index: int, delta: Delta, **more: Any) -> str:
        choice = ChatChunkChoice(index=index, delta=delta, **more)
        chunk = ChatChunk(**self._head, choices=[choice])
        return chunk.model_dump_json(exclude_none=True)

    def _read(self, index: int, text: str, *, ended: bool) -> tuple[str, list[CallPiece]]:
        reader = self._readers[index]
        return (text, []) if reader is None else reader.feed(text, ended=ended)

    def _calls(self, index: int) -> int:
        reader = self._readers[index]
        return 0 if reader is None else reader.num_calls

    def _reason(self, completion: CompletionOutput) -> Finish:
        reason = completion.finish_reason
        assert reason is not None
        return "tool_calls" if reason == "stop" and self._calls(completion.index) else reason

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        top = self._body.top_logprobs or 0
        return chat_logprobs(completion.token_ids, completion.logprobs, top)


def _news_of(piece: CallPiece) -> CalledToolDelta:
    return CalledToolDelta(
        index=piece.index,
        id=piece.id,
        type=None if piece.id is None else "function",
        function=FunctionDelta(name=piece.name, arguments=piece.arguments),
    )
