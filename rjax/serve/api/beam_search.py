"""The field ``use_beam_search``: beam search over HTTP, with the fields of vLLM."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from rjax.api.beam_search import Beam, BeamSearch, BeamSearchParams
from rjax.engine_channel.output_queue import OutputSink
from rjax.errors import InvalidRequestError
from rjax.outputs import CompletionOutput, RequestOutput
from rjax.sampling import SamplingParams
from rjax.serve.api.request_group import RequestGroup
from rjax.serve.api.sampling import max_tokens
from rjax.serve.api.service import Service
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.requests import CompletionRequest, SamplingRequest
from rjax.structured.constraint import Constraint

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "temperature": (None, 0, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "stop": (None, "", []),
    "bad_words": (None, []),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "prompt_logprobs": (None,),
    "logprobs_mode": (None, "raw_logprobs"),
}
"""Fields that a search cannot follow, and their values without effect."""


def check_beam_search(body: SamplingRequest) -> None:
    """Refuse fields that contradict ``use_beam_search``, and ``length_penalty`` without it.

    Raises:
        ApiError: 400.
    """
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise ApiError(
                400, "length_penalty needs use_beam_search set to true", param="length_penalty"
            )
        return
    for name, values in _NEUTRAL.items():
        if getattr(body, name) not in values:
            raise ApiError(
                400,
                f"{name} cannot go with use_beam_search, which looks for the whole texts that the "
                "model finds most likely and streams none; leave out one of them",
                param=name,
            )
    if isinstance(body, CompletionRequest):
        if body.best_of not in (None, body.n or 1):
            raise ApiError(
                400, "best_of cannot go with use_beam_search; n is its width", param="best_of"
            )
        if body.echo and (body.logprobs is not None or max_tokens(body) == 0):
            raise ApiError(
                400,
                "echo goes with use_beam_search only without logprobs and with max_tokens above 0",
                param="echo",
            )


class BeamGroup(RequestGroup):
    """The beam searches of one HTTP request, one per prompt. Each round is a `RequestGroup` with
    one request per running beam.

    Args:
        service: the app's service.
        params: the request's sampling parameters; ``n`` is the beam width.
        length_penalty: the length penalty of `BeamSearchParams`.
    """

    def __init__(self, service: Service, params: SamplingParams, length_penalty: float) -> None:
        super().__init__(service, params)
        self._search = BeamSearchParams(
            beam_width=params.n,
            length_penalty=length_penalty,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_ids,
        )
        eos = () if params.ignore_eos else service.tokenizer.eos_token_ids
        self._ends = frozenset((*eos, *params.stop_ids))
        self._prompts: list[tuple[str | None, list[int]]] = []
        self._round: RequestGroup | None = None
        self._tenant = ""
        self._options: dict[str, Any] = {}

    async def start(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        constraint: Constraint | None,
        *,
        tenant: str,
        sink: OutputSink | None = None,
        **options: Any,
    ) -> None:
        """Check the searches; `finals` runs them, and streams nothing.

        Raises:
            ApiError, InvalidRequestError.
        """
        assert sink is None, "a search does not stream"
        service, width = self._service, self._params.n
        if constraint is not None:
            raise ApiError(
                400,
                "structured output and forced tool calls cannot go with use_beam_search; leave out "
                "one of them",
                param="use_beam_search",
            )
        if len(prompts) * width > service.limits.sequences:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with {width} beams each are {len(prompts) * width} "
                f"sequences; at most {service.limits.sequences} fit one request",
                param="n",
            )
        BeamSearch(self._search, self._ends).check_width(service.alternatives.most)
        self._prompts = list(prompts)
        self._tenant, self._options = tenant, options

    async def finals(self) -> list[RequestOutput]:
        """Run the searches and return their outputs, best beam first.

        Raises:
            ApiError, InvalidRequestError, OverloadedError, EngineDeadError.
        """
        searches = [self._new_search(len(tokens)) for _, tokens in self._prompts]
        cached = [0] * len(searches)
        end = time.monotonic() + self._options["timeout"]
        first = True
        while any(search.running for search in searches):
            running = [i for i, search in enumerate(searches) for _ in search.running]
            outputs = await self._next_tokens(searches, end)
            answers: list[list[Any]] = [[] for _ in searches]
            for i, output in zip(running, outputs, strict=True):
                logprobs = output.outputs[0].logprobs
                if not logprobs:
                    raise self._too_slow()
                answers[i].append(logprobs[0])
                if first:
                    cached[i] = output.num_cached_tokens
            first = False
            for search, found in zip(searches, answers, strict=True):
                if search.running:
                    search.advance(found)
        return [
            RequestOutput(
                request_id=f"beams-{i}",
                prompt=text,
                prompt_token_ids=tokens,
                outputs=[
                    self._output(index, beam, tokens)
                    for index, (_, beam) in enumerate(search.finished)
                ],
                finished=True,
                num_cached_tokens=cached[i],
            )
            for i, ((text, tokens), search) in enumerate(zip(self._prompts, searches, strict=True))
        ]

    def close(self) -> None:
        """Abort the beams of an unfinished round."""
        if self._round is not None:
            self._round.close()

    def _new_search(self, prompt_length: int) -> BeamSearch:
        room = self._service.max_model_len - prompt_length
        wanted = self._params.max_tokens
        params = dataclasses.replace(
            self._search, max_tokens=max(1, room if wanted is None else min(room, wanted))
        )
        return BeamSearch(params, self._ends, self._params.logprobs)

    async def _next_tokens(self, searches: list[BeamSearch], end: float) -> list[RequestOutput]:
        """Request the next token of every running beam of every search."""
        left = end - time.monotonic()
        if left <= 0:
            raise self._too_slow()
        ask = searches[0].sampling_params()
        prompts = [
            (None, [*tokens, *beam.tokens])
            for (_, tokens), search in zip(self._prompts, searches, strict=True)
            for beam in search.running
        ]
        self._round = RequestGroup(self._service, ask)
        try:
            options: dict[str, Any] = self._options | {"timeout": left}
            await self._round.start(prompts, None, tenant=self._tenant, **options)
            return await self._round.finals()
        finally:
            self._round.close()

    def _too_slow(self) -> InvalidRequestError:
        seconds = self._service.limits.request_seconds
        return InvalidRequestError(
            f"the beam search did not end within {seconds:g} seconds; lower n or max_tokens"
        )

    def _output(self, index: int, beam: Beam, prompt_token_ids: list[int]) -> CompletionOutput:
        params, tokens = self._params, beam.tokens
        ended = tokens[-1] in self._ends
        detokenizer = self._service.tokenizer.detokenizer(
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        shown = tokens[:-1] if ended and not params.include_stop_str_in_output else tokens
        return CompletionOutput(
            index=index,
            text="".join(map(detokenizer.push, shown)) + detokenizer.flush(),
            token_ids=list(tokens),
            cumulative_logprob=beam.total,
            logprobs=list(beam.logprobs) if params.logprobs is not None else None,
            finish_reason="stop" if ended else "length",
            stop_reason=tokens[-1] if tokens[-1] in params.stop_ids else None,
        )


def request_group(body: SamplingRequest, service: Service, params: SamplingParams) -> RequestGroup:
    """The engine requests of a request that samples or searches."""
    if body.use_beam_search:
        return BeamGroup(
            service, params, 1.0 if body.length_penalty is None else body.length_penalty
        )
    return RequestGroup(service, params)
