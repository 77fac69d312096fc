"""POST /v1/chat/completions."""

import dataclasses
import functools
from collections.abc import Awaitable, Callable

from fastapi import Request
from fastapi.responses import Response

from rjax.outputs import RequestOutput
from rjax.sampling import SamplingParams
from rjax.serve.api.beam_search import check_beam_search, request_group
from rjax.serve.api.chat_parts import ChatEncoder, ChatParts
from rjax.serve.api.output_events import OutputEncoder, OutputEvents
from rjax.serve.api.prompts import chat_prompt, kept_tokens
from rjax.serve.api.request_group import RequestGroup
from rjax.serve.api.sampling import chat_params, check_constrained, max_tokens, request_constraint
from rjax.serve.api.service import Service
from rjax.serve.api.structured_outputs import check_schema, text_constraint
from rjax.serve.api.tenancy import engine_options
from rjax.serve.http.auth import Tenant
from rjax.serve.http.chunked_json import chunked_response, response_size
from rjax.serve.http.disconnect import cancel_on_disconnect
from rjax.serve.parsing.tools.prompt import message_text
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.logprobs import within_logprobs_limit
from rjax.serve.protocol.requests import ChatCompletionRequest, NamedTool, Tool
from rjax.structured.constraint import Constraint


async def chat(
    body: ChatCompletionRequest, request: Request, tenant: Tenant, service: Service
) -> Response:
    """Answer a chat request."""
    run = await prepare_chat(body, tenant, service)
    if body.stream:
        return await run.stream(ChatEncoder(run.parts, body))
    output = await run.final(request)
    size = response_size([output], run.params)
    return await chunked_response(lambda: run.parts.whole(output), size, service.response_threads)


async def prepare_chat(
    body: ChatCompletionRequest, tenant: Tenant, service: Service, *, answer_logprobs: bool = False
) -> "ChatRun":
    """Check a chat request and render its prompt, without submitting it.

    Args:
        body: the request's body.
        tenant: the client's tenant.
        service: the app's service.
        answer_logprobs: give logprobs only for the content's tokens, not for those of reasoning and
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
    options = {"tenant": tenant.name, **engine_options(body, tenant, service.config)}
    parts = ChatParts(
        body, service, params, tools, prompt[1], start, answer_logprobs=answer_logprobs
    )
    start_group = functools.partial(group.start, [prompt], constraint, **options)
    return ChatRun(params, group, parts, service, start_group)


class ChatRun:
    """A chat request that is ready to run, for the routes of chats and of the Responses API.

    Args:
        params: sampling parameters of its samples.
        group: the engine request of its prompt.
        parts: converts its outputs.
        service: the app's service.
        start: coroutine function that submits the prompt.
    """

    def __init__(
        self,
        params: SamplingParams,
        group: RequestGroup,
        parts: ChatParts,
        service: Service,
        start: Callable[..., Awaitable[None]],
    ) -> None:
        self.params = params
        self.parts = parts
        self._group = group
        self._service = service
        self._start = start

    async def start(self) -> None:
        """Submit the prompt.

        Raises:
            ApiError, InvalidRequestError, OverloadedError, EngineDeadError.
        """
        await self._start()

    async def stream(self, encoder: OutputEncoder) -> OutputEvents:
        """Submit the prompt and stream its outputs.

        Raises:
            ApiError, InvalidRequestError, OverloadedError, EngineDeadError.
        """
        events = OutputEvents(self._group, encoder, self._service.response_threads)
        await self._start(sink=events)
        return events

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

    def close(self) -> None:
        """Abort an unfinished run."""
        self._group.close()


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
    literal = service.config.literal_json_schemas
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
