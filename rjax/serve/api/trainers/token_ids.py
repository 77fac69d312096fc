"""Completions of token ids by token ids: no text is in the request or in the response."""

import secrets
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from rjax.outputs import CompletionOutput, RequestOutput
from rjax.sampling import SamplingParams
from rjax.serve.api.beam_search import request_group
from rjax.serve.api.bodies import as_model
from rjax.serve.api.completions import prepare
from rjax.serve.api.service import Service
from rjax.serve.http.auth import Tenant
from rjax.serve.http.chunked_json import chunked_response, response_size
from rjax.serve.protocol.logprobs import (
    LOWEST,
    lazy_chances,
    lazy_chat_logprobs,
    lazy_prompt_logprobs,
)
from rjax.serve.protocol.requests import CompletionRequest
from rjax.serve.protocol.trainer_requests import OlderGenerateRequest, TokenGenerateRequest
from rjax.serve.protocol.trainer_responses import (
    OlderGenerateResponse,
    TokenChoice,
    TokenGenerateResponse,
)

_NOT_OF_SAMPLING = ("output_kind", "detokenize")
"""Fields of vLLM's SamplingParams without effect here: the response has all samples, and no
text."""


async def generate_token_ids(
    body: TokenGenerateRequest, request: Request, tenant: Tenant, service: Service
) -> Response:
    """Answer a request of /inference/v1/generate."""
    given = {k: v for k, v in body.sampling_params.items() if k not in _NOT_OF_SAMPLING}
    fields = {
        **given,
        "prompt": body.token_ids,
        "model": body.model,
        "priority": body.priority,
        "cache_salt": body.cache_salt,
        "stream": None,
    }
    outputs, params = await _run(fields, request, tenant, service)
    name = body.request_id or f"generate-{secrets.token_hex(12)}"

    def answer() -> TokenGenerateResponse:
        [output] = outputs
        return TokenGenerateResponse.model_construct(
            request_id=name,
            choices=[_choice(sample, params, service) for sample in output.outputs],
            prompt_logprobs=lazy_prompt_logprobs(output.prompt_logprobs),
        )

    size = response_size(outputs, params)
    return await chunked_response(answer, size, service.response_threads)


async def generate_as_older(
    body: OlderGenerateRequest, request: Request, tenant: Tenant, service: Service
) -> Response:
    """Answer a request of /generate/."""
    fields: dict[str, Any] = {
        "prompt": body.prompts,
        "n": body.n,
        "repetition_penalty": body.repetition_penalty,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "max_tokens": body.max_tokens,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
    }
    if body.guided_decoding_regex is not None:
        fields["structured_outputs"] = {"regex": body.guided_decoding_regex}
    fields |= {"logprobs": 0, **body.generation_kwargs, "stream": None}
    outputs, params = await _run(fields, request, tenant, service)

    def answer() -> OlderGenerateResponse:
        samples = [sample for output in outputs for sample in output.outputs]
        return OlderGenerateResponse(
            prompt_ids=[list(output.prompt_token_ids) for output in outputs],
            completion_ids=[list(sample.token_ids) for sample in samples],
            logprobs=[_sampled(sample) for sample in samples],
        )

    size = response_size(outputs, params)
    return await chunked_response(answer, size, service.response_threads)


async def _run(
    fields: dict[str, Any], request: Request, tenant: Tenant, service: Service
) -> tuple[list[RequestOutput], SamplingParams]:
    """The last outputs of a completion request with these fields, and its parameters."""
    body = as_model(fields, CompletionRequest, service.unknown_fields)
    prepared = await prepare(body, tenant, service)
    group = request_group(body, service, prepared.params)
    return await prepared.finals(group, request), prepared.params


def _sampled(sample: CompletionOutput) -> list[float]:
    """Logprobs of a sample's tokens."""
    return [max(entry[0][1], LOWEST) for entry in lazy_chances(sample.logprobs or [])]


def _choice(sample: CompletionOutput, params: SamplingParams, service: Service) -> TokenChoice:
    logprobs = None
    if sample.logprobs is not None:
        logprobs = lazy_chat_logprobs(
            lazy_chances(sample.logprobs),
            params.logprobs or 0,
            service.tokenizer.token_text,
            service.tokenizer.token_bytes,
            as_token_ids=True,
        )
    return TokenChoice.model_construct(
        index=sample.index,
        token_ids=sample.token_ids,
        logprobs=logprobs,
        finish_reason=sample.finish_reason,
    )
