"""POST /v1/completions."""

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from rjax.outputs import CompletionOutput, RequestOutput
from rjax.sampling import SamplingParams
from rjax.serve import prefixes
from rjax.serve.auth import Tenant
from rjax.serve.beam_search import check_beam_search, request_group
from rjax.serve.chunked_json import chunked_response, iter_json, response_size
from rjax.serve.disconnect import cancel_on_disconnect
from rjax.serve.errors import as_api_error, error_body
from rjax.serve.event_stream import EventStream
from rjax.serve.logprobs import completion_logprobs, prompt_logprobs, within_logprobs_limit
from rjax.serve.prompts import completion_prompts, kept_tokens
from rjax.serve.request_group import RequestGroup
from rjax.serve.requests import CompletionRequest, SamplingRequest
from rjax.serve.responses import (
    CompletionLogprobs,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionTokensDetails,
    PromptTokensDetails,
    UsageInfo,
)
from rjax.serve.sampling import (
    check_constrained,
    completion_params,
    max_tokens,
    request_constraint,
)
from rjax.serve.service import Service
from rjax.serve.tenancy import engine_options
from rjax.serve.text_offsets import TextOffsets, prompt_offsets


async def complete(
    body: CompletionRequest, request: Request, tenant: Tenant, service: Service
) -> Response:
    """Answer a completion request."""
    service.check_model(body.model)
    check_beam_search(body)
    params = completion_params(body, service.defaults, service.limits, service.alternatives)
    constraint = request_constraint(body, service.limits, literal=service.literal_json_schemas)
    if constraint is not None:
        check_constrained(params)
    prefix = []
    if body.prefix is not None:
        prefix = prefixes.find(body.prefix, tenant, service).token_ids
    last = kept_tokens(body, params.max_tokens, service, len(prefix))
    prompts = await completion_prompts(body, last, tenant, service)
    if prefix:
        # The prefix may have no text, so echo decodes the joined tokens.
        prompts = [(None, prefix + own) for _, own in prompts]
    lengths = [len(tokens) for _, tokens in prompts]
    service.check_prompts(lengths, "prompt")
    params = within_logprobs_limit(
        params,
        lengths,
        service.max_model_len,
        service.limits.request_logprobs,
        max_tokens_given=max_tokens(body) is not None,
    )
    group = request_group(body, service, params)
    builder = _ResponseBuilder(body, service, params)
    options = engine_options(body, tenant, service.limits)
    if body.stream:
        await group.start(prompts, constraint, tenant=tenant.name, **options)
        return EventStream(builder.events(group), group.close)

    async def whole() -> list[RequestOutput]:
        await group.start(prompts, constraint, tenant=tenant.name, **options)
        return await group.finals()

    try:
        outputs = await cancel_on_disconnect(request, whole())
    finally:
        group.close()
    size = response_size(outputs, params)
    return await chunked_response(lambda: builder.whole(outputs), size, service.response_threads)


class UsageCounter:
    """Counts the tokens of a request's prompts and samples."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._generated = 0

    def add(self, index: int, output: RequestOutput, hidden: int = 0) -> None:
        """Count an output: every output of a stream, otherwise only the last one.

        Args:
            index: of the prompt.
            output: with tokens that were not counted before.
            hidden: how many of them the response omits.
        """
        self.add_prompt(index, output)
        self._generated += sum(len(c.token_ids) for c in output.outputs) - hidden

    def add_prompt(self, index: int, output: RequestOutput) -> None:
        """Count an output's prompt alone, before its generated tokens are reported."""
        self._prompts[index] = (len(output.prompt_token_ids), output.num_cached_tokens)

    def usage(self, reasoning: int = 0) -> UsageInfo:
        """The usage so far, of which ``reasoning`` generated tokens are reasoning."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        return UsageInfo(
            prompt_tokens=prompt,
            completion_tokens=self._generated,
            total_tokens=prompt + self._generated,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(cached for _, cached in self._prompts.values())
            ),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning),
        )


class _ResponseBuilder:
    """Converts engine outputs to responses and stream chunks."""

    def __init__(self, body: CompletionRequest, service: Service, params: SamplingParams) -> None:
        self._body = body
        self._scores = max_tokens(body) == 0  # the prompt; no token is shown
        self._service = service
        self._params = params
        self._n = params.n
        self._head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.model,
        }
        self._lengths: dict[int, int] = {}  # characters of each choice so far
        self._offsets: dict[int, TextOffsets] = {}
        self._prompt_offsets: dict[int, list[int]] = {}
        self._of_prompts: dict[int, list[dict[str, Any] | None] | None] = {}
        self._count = UsageCounter()

    def whole(self, outputs: list[RequestOutput]) -> CompletionResponse:
        """The response, from the last output of each prompt."""
        choices = []
        for i, output in enumerate(outputs):
            for completion in output.outputs:
                choice = self._choice(i, output, completion, first=True)
                choices.append(choice)
            self._count.add(i, output, self._hidden(output))
        return CompletionResponse(**self._head, choices=choices, usage=self._count.usage())

    async def events(self, group: RequestGroup) -> AsyncIterator[str]:
        """The events of a stream: chunks, the usage if requested, and ``[DONE]``."""
        begun: set[int] = set()
        ended: set[int] = set()
        try:
            async for i, output in group.outputs():
                self._count.add(i, output, self._hidden(output))
                for completion in output.outputs:
                    index = i * self._n + completion.index
                    if index in ended:
                        continue
                    if completion.finish_reason is not None:
                        ended.add(index)
                    first = index not in begun
                    begun.add(index)
                    if first or completion.token_ids or completion.finish_reason is not None:
                        yield await self._event(i, output, completion, first=first)
            if usage_wanted(self._body):
                response = CompletionResponse(**self._head, choices=[], usage=self._count.usage())
                yield response.model_dump_json()
            yield "[DONE]"
        except Exception as error:
            yield stream_error(error)

    def _hidden(self, output: RequestOutput) -> int:
        if not self._scores:
            return 0
        return sum(len(c.token_ids) for c in output.outputs)

    async def _event(
        self, i: int, output: RequestOutput, completion: CompletionOutput, *, first: bool
    ) -> str:
        """A chunk; the first one may hold the prompt's tokens and logprobs."""
        usage = self._count.usage() if continuous_usage(self._body) else None

        hidden = {"usage"} if usage is None else None

        def make() -> CompletionResponse:
            choice = self._choice(i, output, completion, first=first)
            return CompletionResponse(**self._head, choices=[choice], usage=usage)

        body = self._body
        large = body.echo or body.return_token_ids or body.prompt_logprobs is not None
        if not (first and large):
            return make().model_dump_json(exclude=hidden)
        return await self._service.response_threads.run(
            lambda: "".join(iter_json(make(), exclude=frozenset(hidden or ())))
        )

    def _choice(
        self, i: int, output: RequestOutput, completion: CompletionOutput, *, first: bool
    ) -> CompletionResponseChoice:
        body = self._body
        index = i * self._n + completion.index
        echo = body.echo and first
        hidden = self._scores
        text = "" if hidden else completion.text
        before = ""
        if echo:
            before = output.prompt
            if before is None:
                before = self._service.tokenizer.decode(
                    output.prompt_token_ids, skip_special_tokens=False
                )
        self._lengths[index] = self._lengths.get(index, 0) + len(before) + len(text)
        return CompletionResponseChoice(
            index=index,
            text=before + text,
            logprobs=self._logprobs(i, output, completion, echo=echo, before=before),
            finish_reason=completion.finish_reason,
            stop_reason=None if hidden else completion.stop_reason,
            token_ids=completion.token_ids if body.return_token_ids and not hidden else None,
            prompt_token_ids=output.prompt_token_ids if body.return_token_ids and first else None,
            prompt_logprobs=self._prompt_logprobs(i, output)
            if body.prompt_logprobs is not None and first
            else None,
        )

    def _prompt_logprobs(self, i: int, output: RequestOutput) -> list[dict[str, Any] | None] | None:
        """Prompt logprobs, converted once for all samples of the prompt."""
        if i not in self._of_prompts:
            self._of_prompts[i] = prompt_logprobs(output.prompt_logprobs)
        return self._of_prompts[i]

    def _logprobs(
        self,
        i: int,
        output: RequestOutput,
        completion: CompletionOutput,
        *,
        echo: bool,
        before: str,
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None or completion.logprobs is None:
            return None
        index = i * self._n + completion.index
        tokenizer, prompt = self._service.tokenizer, output.prompt_token_ids
        tokens: list[int] = []
        entries: list[Any] = []
        offsets: list[int] = []
        if echo and output.prompt_logprobs is not None:
            if i not in self._prompt_offsets:
                self._prompt_offsets[i] = prompt_offsets(tokenizer, prompt, before)
            tokens += prompt
            entries += output.prompt_logprobs
            offsets += self._prompt_offsets[i]
        if not self._scores:
            if index not in self._offsets:
                self._offsets[index] = TextOffsets(tokenizer, prompt, self._params, len(before))
            tokens += completion.token_ids
            entries += completion.logprobs
            offsets += self._offsets[index].add(completion.token_ids)
        if completion.finish_reason is not None:  # a stop string may have cut the text
            offsets = [min(offset, self._lengths[index]) for offset in offsets]
        as_ids = tokens_as_token_ids(self._body, self._service)
        return completion_logprobs(
            tokens, entries, offsets, tokenizer.token_text, as_token_ids=as_ids
        )


def tokens_as_token_ids(body: SamplingRequest, service: Service) -> bool:
    """Whether logprobs contain ``token_id:N`` instead of a token's text."""
    asked = body.return_tokens_as_token_ids
    return service.return_tokens_as_token_ids if asked is None else asked


def usage_wanted(body: SamplingRequest) -> bool:
    """Whether a last chunk reports the usage."""
    return body.stream_options is not None and body.stream_options.include_usage


def continuous_usage(body: SamplingRequest) -> bool:
    """Whether every chunk reports the usage so far; as in vLLM this needs ``include_usage``."""
    options = body.stream_options
    return options is not None and options.include_usage and options.continuous_usage_stats


def stream_error(error: Exception) -> str:
    """The last event of a stream that failed."""
    found = as_api_error(error)
    return json.dumps(error_body(found.status, found.message, found.code, found.param))
