"""POST /v1/completions."""

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from rjax.outputs import CompletionOutput, RequestOutput, token_chances
from rjax.sampling import SamplingParams
from rjax.serve.api import prefixes
from rjax.serve.api.beam_search import check_beam_search, request_group
from rjax.serve.api.chunks import CompletionChunks, UsageCounter
from rjax.serve.api.output_events import DONE, OutputEncoder, OutputEvents
from rjax.serve.api.prompts import TokenPrompt, completion_prompts, kept_tokens
from rjax.serve.api.request_group import RequestGroup
from rjax.serve.api.sampling import (
    check_constrained,
    completion_params,
    max_tokens,
    request_constraint,
)
from rjax.serve.api.service import Service
from rjax.serve.api.tenancy import engine_options
from rjax.serve.api.text_offsets import TextOffsets, prompt_offsets
from rjax.serve.http.auth import Tenant
from rjax.serve.http.chunked_json import chunked_response, response_size
from rjax.serve.http.disconnect import cancel_on_disconnect
from rjax.serve.protocol.logprobs import (
    completion_logprobs,
    joined,
    lazy_chances,
    lazy_completion_logprobs,
    lazy_prompt_logprobs,
    within_logprobs_limit,
)
from rjax.serve.protocol.requests import CompletionRequest, SamplingRequest
from rjax.serve.protocol.responses import (
    CompletionResponse,
    CompletionResponseChoice,
    UsageInfo,
)
from rjax.structured.constraint import Constraint


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """What a completion request asks of the engine.

    Attributes:
        params: sampling parameters of every prompt.
        constraint: on every sample; None for none.
        prompts: text, if known, and token ids of each prompt.
        options: of the engine's ``add_request``, with the tenant's name.
    """

    params: SamplingParams
    constraint: Constraint | None
    prompts: Sequence[TokenPrompt]
    options: dict[str, Any]

    async def finals(self, group: RequestGroup, request: Request) -> list[RequestOutput]:
        """Run the request, and return the last output of each prompt."""

        async def whole() -> list[RequestOutput]:
            await group.start(self.prompts, self.constraint, **self.options)
            return await group.finals()

        try:
            return await cancel_on_disconnect(request, whole())
        finally:
            group.close()


async def prepare(body: CompletionRequest, tenant: Tenant, service: Service) -> PreparedCompletion:
    """Check a completion request and tokenise its prompts."""
    service.check_model(body.model)
    check_beam_search(body)
    params = completion_params(body, service.defaults, service.limits, service.alternatives)
    constraint = request_constraint(
        body, service.limits, literal=service.config.literal_json_schemas
    )
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
    options = {"tenant": tenant.name, **engine_options(body, tenant, service.config)}
    return PreparedCompletion(params, constraint, prompts, options)


async def complete(
    body: CompletionRequest, request: Request, tenant: Tenant, service: Service
) -> Response:
    """Answer a completion request."""
    prepared = await prepare(body, tenant, service)
    params = prepared.params
    group = request_group(body, service, params)
    if body.stream:
        encoder = CompletionEncoder(body, service, params)
        events = OutputEvents(group, encoder, service.response_threads)
        await group.start(prepared.prompts, prepared.constraint, sink=events, **prepared.options)
        return events
    outputs = await prepared.finals(group, request)
    size = response_size(outputs, params)
    builder = ResponseBuilder(body, service, params)
    return await chunked_response(lambda: builder.whole(outputs), size, service.response_threads)


class ResponseBuilder:
    """Converts engine outputs to the parts of responses and of stream chunks."""

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
        self._count = UsageCounter()

    def whole(self, outputs: list[RequestOutput]) -> CompletionResponse:
        """The response, from the last output of each prompt; its log-probabilities are lazy."""
        choices = []
        for i, output in enumerate(outputs):
            for completion in output.outputs:
                fields = self._choice(i, output, completion, first=True, large=True)
                choices.append(CompletionResponseChoice.model_construct(**fields))
            self._add(i, output)
        usage = UsageInfo.model_validate(self._count.usage())
        return CompletionResponse(**self._head, choices=choices, usage=usage)

    def _add(self, i: int, output: RequestOutput) -> None:
        shown = 0 if self._scores else sum([len(c.token_ids) for c in output.outputs])
        self._count.add(i, len(output.prompt_token_ids), output.num_cached_tokens, shown)

    def _choice(
        self,
        i: int,
        output: RequestOutput,
        completion: CompletionOutput,
        *,
        first: bool,
        large: bool,
    ) -> dict[str, Any]:
        """The fields of a `CompletionResponseChoice`. With ``first`` they may include those of the
        prompt; with ``large`` they hold lazy lists."""
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
        return {
            "index": index,
            "text": before + text,
            "logprobs": self._logprobs(
                i, output, completion, echo=echo, before=before, large=large
            ),
            "finish_reason": completion.finish_reason,
            "stop_reason": None if hidden else completion.stop_reason,
            "token_ids": completion.token_ids if body.return_token_ids and not hidden else None,
            "prompt_token_ids": output.prompt_token_ids
            if body.return_token_ids and first
            else None,
            "prompt_logprobs": lazy_prompt_logprobs(output.prompt_logprobs)
            if body.prompt_logprobs is not None and first
            else None,
        }

    def _logprobs(
        self,
        i: int,
        output: RequestOutput,
        completion: CompletionOutput,
        *,
        echo: bool,
        before: str,
        large: bool,
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None or completion.logprobs is None:
            return None
        index = i * self._n + completion.index
        tokenizer, prompt = self._service.tokenizer, output.prompt_token_ids
        tokens: list[int] = []
        entries: Sequence[Any] = []
        offsets: list[int] = []
        if echo and output.prompt_logprobs is not None:
            if i not in self._prompt_offsets:
                self._prompt_offsets[i] = prompt_offsets(tokenizer, prompt, before)
            tokens += prompt
            entries = lazy_chances(output.prompt_logprobs)
            offsets += self._prompt_offsets[i]
        if not self._scores:
            if index not in self._offsets:
                self._offsets[index] = TextOffsets(tokenizer, prompt, self._params, len(before))
            tokens += completion.token_ids
            sampled = (lazy_chances if large else token_chances)(completion.logprobs)
            entries = joined(entries, sampled) if entries else sampled
            offsets += self._offsets[index].add(completion.token_ids)
        if completion.finish_reason is not None:  # a stop string may have cut the text
            offsets = [min(offset, self._lengths[index]) for offset in offsets]
        as_ids = tokens_as_token_ids(self._body, self._service)
        return (lazy_completion_logprobs if large else completion_logprobs)(
            tokens, entries, offsets, tokenizer.token_text, as_token_ids=as_ids
        )


class CompletionEncoder(ResponseBuilder, OutputEncoder):
    """The events of a stream: chunks, the usage if requested, and ``[DONE]``."""

    def __init__(self, body: CompletionRequest, service: Service, params: SamplingParams) -> None:
        super().__init__(body, service, params)
        self._chunks = CompletionChunks(**self._head)
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._each_usage = continuous_usage(body)
        self._last_usage = usage_wanted(body)
        self._has_prompts = bool(
            body.echo or body.return_token_ids or body.prompt_logprobs is not None
        )
        self._is_plain = not (
            self._has_prompts or self._each_usage or self._scores or body.logprobs is not None
        )

    def is_large(self, prompt: int, output: RequestOutput, *, last: bool) -> bool:
        """Whether a chunk of this output holds text, token ids or logprobs of the prompt."""
        return self._has_prompts and any(
            prompt * self._n + c.index not in self._begun for c in output.outputs
        )

    def encode(self, prompt: int, output: RequestOutput, *, last: bool) -> list[str]:
        """See `OutputEncoder`."""
        self._add(prompt, output)
        chunks = []
        for completion in output.outputs:
            index = prompt * self._n + completion.index
            ended = completion.finish_reason is not None
            if index in self._ended:
                continue
            if ended:
                self._ended.add(index)
            first = index not in self._begun
            self._begun.add(index)
            if not (first or completion.token_ids or ended):
                continue
            if self._is_plain and not ended:
                chunks.append(self._chunks.text(index, completion.text))
                continue
            large = first and self._has_prompts
            fields = self._choice(prompt, output, completion, first=first, large=large)
            usage = self._count.usage() if self._each_usage else None
            chunks.append(self._chunks.choice(fields, usage, large=large))
        if last:
            chunks.append(self._chunks.usage(self._count.usage()) if self._last_usage else "")
            chunks.append(DONE)
        return chunks


def tokens_as_token_ids(body: SamplingRequest, service: Service) -> bool:
    """Whether logprobs contain ``token_id:N`` instead of a token's text."""
    asked = body.return_tokens_as_token_ids
    return service.config.return_tokens_as_token_ids if asked is None else asked


def usage_wanted(body: SamplingRequest) -> bool:
    """Whether a last chunk reports the usage."""
    return body.stream_options is not None and body.stream_options.include_usage


def continuous_usage(body: SamplingRequest) -> bool:
    """Whether every chunk reports the usage so far; as in vLLM this needs ``include_usage``."""
    options = body.stream_options
    return options is not None and options.include_usage and options.continuous_usage_stats
