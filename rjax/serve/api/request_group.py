"""The engine requests of one HTTP request: one per prompt."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from rjax.engine_channel.output_queue import OutputQueue, OutputSink
from rjax.errors import GrammarFailedError, OverloadedError
from rjax.outputs import RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.serve.api.service import Service
from rjax.serve.protocol.errors import ApiError
from rjax.structured.constraint import Constraint


class RequestGroup:
    """Several prompts with the same parameters, whose outputs come together.

    `finals` waits for the last outputs; or the outputs go to the sink that `start` is given, which
    calls `accept` with each.

    Args:
        service: the app's service.
        params: sampling parameters of every prompt.
    """

    def __init__(self, service: Service, params: SamplingParams) -> None:
        self._service = service
        self._params = params
        self._queue = self.new_queue()
        self._streams: dict[str, Any] = {}
        self._num_open = 0
        self._generated: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._index: dict[str, int] = {}
        self._grammar_failure: str | None = None
        self._failed: set[tuple[str, int]] = set()  # request id and index of a sample

    async def start(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        constraint: Constraint | None,
        *,
        tenant: str,
        sink: OutputSink | None = None,
        **options: Any,
    ) -> None:
        """Submit all prompts, or none if one is refused.

        Args:
            prompts: text, if known, and token ids of each prompt.
            constraint: the constraint on every sample; None for none.
            tenant: name of the client's tenant.
            sink: gets the outputs, maybe before this returns; None for `finals`.
            options: keyword arguments of the engine's ``add_request``.

        Raises:
            ApiError, InvalidRequestError, OverloadedError, EngineDeadError.
        """
        service, params = self._service, self._params
        most, samples = service.limits.sequences, params.num_sequences
        count = len(prompts) * samples
        if count > most:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with {samples} samples each are {count} sequences; "
                f"at most {most} fit one request",
                param="n" if params.best_of is None else "best_of",
            )
        try:
            prompt_tokens = sum(len(tokens) for _, tokens in prompts)
            service.engine.check_capacity(count, prompt_tokens, tenant)
            if constraint is not None:
                options["mask_request"] = await service.grammars.check(constraint, tenant)

            async def submit(i: int, text: str | None, tokens: list[int]) -> None:
                stream = await service.engine.submit(
                    tokens,
                    params,
                    sink=self._queue if sink is None else sink,
                    tenant=tenant,
                    prompt=text,
                    **options,
                )
                self._streams[stream.request_id] = stream
                self._index[stream.request_id] = i
                self._generated[stream.request_id] = 0

            found = await asyncio.gather(
                *(_started(submit(i, *prompt)) for i, prompt in enumerate(prompts)),
                return_exceptions=True,
            )
            for failed in found:
                if failed is not None:
                    raise failed
            self._num_open = len(self._streams)
        except BaseException as error:
            self.close()
            if isinstance(error, OverloadedError):
                service.metrics.rejected(error.reason)
            raise

    def new_queue(self) -> OutputQueue:
        """A new queue for outputs of this group."""
        return OutputQueue(self._params.output_kind, self._service.engine.limits.unread_tokens)

    @property
    def done(self) -> bool:
        """Whether every prompt of a started group has finished."""
        return self._num_open == 0

    def accept(self, output: RequestOutput) -> int | None:
        """Count an output before it is sent.

        A sample that ends on an error harms no other. Its choice has the ``finish_reason`` "error";
        if its grammar failed, its ``stop_reason`` says why.

        Returns:
            The index of its prompt; None for an output of a prompt that has finished.

        Raises:
            ApiError: every sample ended on an error: 400 if a grammar caused it, otherwise 500.
        """
        name = output.request_id
        stream = self._streams.get(name)
        if stream is None or stream.finished:
            return None
        self._count(name, output)
        if output.finished:
            self._num_open -= 1
            stream.finished = True
            stream.close()
            self._service.metrics.finished(output, self._params, self._generated[name])
        if any([c.finish_reason == "error" for c in output.outputs]):
            self._record_errors(output)
            if len(self._failed) == len(self._streams) * self._params.n:
                raise self._failure()
        return self._index[name]

    def _record_errors(self, output: RequestOutput) -> None:
        """Record the failed samples. Errors of the server are only logged, not sent."""
        for completion in output.outputs:
            if completion.finish_reason == "error":
                self._failed.add((output.request_id, completion.index))
                if isinstance(completion.error, GrammarFailedError):
                    self._grammar_failure = self._grammar_failure or str(completion.error)
                else:
                    completion.stop_reason = None

    def _count(self, name: str, output: RequestOutput) -> None:
        """Count an output's tokens and record the inter-token latency of a stream."""
        now = time.monotonic()
        if name in self._last and self._params.output_kind is RequestOutputKind.DELTA:
            self._service.metrics.streamed(now - self._last[name])
        self._last[name] = now
        self._generated[name] += sum([len(c.token_ids) for c in output.outputs])

    async def finals(self) -> list[RequestOutput]:
        """The last output of each prompt, for requests that do not stream.

        Raises:
            ApiError: see `accept`.
        """
        found: dict[int, RequestOutput] = {}
        while not self.done:
            output = await self._queue.get()
            index = self.accept(output)
            if index is not None and output.finished:
                found[index] = output
        return [found[i] for i in sorted(found)]

    def _failure(self) -> ApiError:
        if self._grammar_failure is not None:
            message = f"{self._grammar_failure}; make it simpler"
            return ApiError(400, message, code="grammar_failed")
        return ApiError(500, "the server failed on this request; its log says why")

    def close(self) -> None:
        """Abort unfinished prompts."""
        for stream in self._streams.values():
            if not stream.finished:
                self._service.metrics.aborted(self._params.n)
            stream.close()


def _started(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that has run up to its first wait, so that the engine gets the first of many requests
    that arrive together before the last one is parsed."""
    return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
