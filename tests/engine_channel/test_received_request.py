"""A request over the wire gives what its engine alone gives, however late the engine learns of a
stop string and however its messages are merged."""

import functools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rjax.engine.best_samples import best_samples
from rjax.engine.completion import Completion, StepLogprobs
from rjax.engine.completion_text import CompletionText
from rjax.engine_channel.output_codec import SentRequest
from rjax.engine_channel.output_queue import merge_delta
from rjax.engine_channel.received_request import ReceivedRequest
from rjax.engine_channel.value_codec import unpack_params
from rjax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.tokenization import Tokenizer
from tests.frontend.tiny_tokenizers import build
from tests.properties import num_examples

TEXTS = ("well STOP here", "ab\n\nab 🙂é end", "  a  b", "STSTOPOP")
EOS = frozenset({1})
PROMPT = [40, 41]


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    return build(name)


class Engine:
    """Sequences of given tokens, as the engine makes them of these parameters."""

    def __init__(
        self, params: SamplingParams, texts: Tokenizer | None, streams: list[list[int]], limit: int
    ) -> None:
        each = params.each_sequence()
        self.params, self.streams = params, streams
        self.completions = [
            Completion(
                i,
                each,
                tokenizer=texts,
                eos_token_ids=EOS,
                max_tokens=limit,
                prompt_token_ids=PROMPT,
            )
            for i in range(len(streams))
        ]

    def step(self, at: int) -> RequestOutput | None:
        """The next tokens; None if no output is due."""
        for i, (completion, stream) in enumerate(zip(self.completions, self.streams, strict=True)):
            if completion.finished:
                continue
            tops = [stream[at], 50 + i, 60]
            step = StepLogprobs(-0.1 * (at % 7 + i + 1), 2, tops, [-0.25, -0.5, -1.5])
            completion.append(stream[at], step)
        return self.output()

    def output(self) -> RequestOutput | None:
        finished = all(c.finished for c in self.completions)
        kind = self.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        found: list[CompletionOutput] = [c.snapshot(kind) for c in self.completions]
        if len(found) > self.params.n:
            found = best_samples(found, self.params)
        metrics = RequestMetrics(1.0)
        metrics.num_generated_tokens = max(len(c.token_ids) for c in self.completions)
        return RequestOutput("r", None, PROMPT, None, found, finished, metrics)


def whole(params: SamplingParams, texts: Tokenizer | None, streams: Any, limit: int) -> Any:
    """All outputs of an engine in this process."""
    engine = Engine(params, texts, streams, limit)
    outputs = [engine.step(at) for at in range(limit)]
    return [output for output in outputs[: _last(outputs) + 1] if output is not None]


def _last(outputs: list[Any]) -> int:
    return next(i for i, output in enumerate(outputs) if output is not None and output.finished)


def over_the_wire(
    params: SamplingParams, texts: Tokenizer | None, streams: Any, limit: int, late: int, merge: int
) -> list[RequestOutput]:
    """All outputs of a front end whose engine learns ``late`` steps later where a text ends, and
    whose messages are read ``merge`` at a time."""
    received = ReceivedRequest(params, None, PROMPT, texts)
    engine = Engine(unpack_params(received.sent_params()), texts, streams, limit)
    sent = SentRequest(len(PROMPT))
    found: list[RequestOutput] = []
    stops: list[tuple[int, int]] = []
    held: RequestOutput | None = None
    for at in range(limit + late + 1):
        for due, sample in stops:
            if due == at:
                engine.completions[sample].stop()
        output = engine.output() if all(c.finished for c in engine.completions) else engine.step(at)
        if output is not None:
            if held is None:
                held = output
            else:
                merge_delta(held, output)
            if held.finished or at % merge == merge - 1:
                packed = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.pack(held)))
                held = None
                unpacked = received.unpack(packed)
                stops += [(at + 1 + late, sample) for sample in received.stopped]
                received.stopped = []
                if unpacked is not None:
                    found.append(unpacked)
                    if unpacked.finished:
                        return found
    raise AssertionError("no last output")


def joined(outputs: list[RequestOutput], kind: RequestOutputKind) -> list[CompletionOutput]:
    """The samples as a whole."""
    if kind is not RequestOutputKind.DELTA:
        return outputs[-1].outputs
    first, *rest = outputs
    for output in rest:
        merge_delta(first, output)
    return first.outputs


@settings(max_examples=num_examples(150), deadline=None)
@given(data=st.data())
def test_outputs_are_those_of_an_engine_in_this_process(data: st.DataObject) -> None:
    pick = data.draw
    texts = tokenizer(pick(st.sampled_from(["byte_level_bos", "metaspace_normalizer"])))
    kind = pick(st.sampled_from(list(RequestOutputKind)))
    best_of = None if kind is RequestOutputKind.DELTA else pick(st.sampled_from([None, None, 3]))
    n = pick(st.integers(1, 2))
    params = SamplingParams(
        n=n,
        best_of=best_of,
        max_tokens=None,
        output_kind=kind,
        stop=pick(st.sampled_from([None, "STOP", ["b", "ab\n"], ["é", " "]])),
        stop_token_ids=pick(st.sampled_from([None, [2]])),
        include_stop_str_in_output=pick(st.booleans()),
        min_tokens=pick(st.sampled_from([0, 0, 3])),
        logprobs=pick(st.sampled_from([None, 0, 2])),
        skip_special_tokens=pick(st.booleans()),
    )
    pieces = [texts.encode(text, add_special_tokens=False) for text in TEXTS]
    ids = [*sorted({i for piece in pieces for i in piece}), 1, 2, 3]
    limit = pick(st.integers(3, 14))

    def stream() -> list[int]:
        begin = pick(st.sampled_from([[], *pieces]))
        more = pick(st.lists(st.sampled_from(ids), min_size=limit, max_size=limit))
        return [*begin, *more]

    streams = [stream() for _ in range(params.num_sequences)]
    # The engine goes on beyond the end until it is told.
    late = pick(st.integers(0, 3))
    for row in streams:
        row += [40] * (late + 1)
    want = whole(params, texts, streams, limit)
    merge = 1 if kind is RequestOutputKind.CUMULATIVE else pick(st.integers(1, 3))
    found = over_the_wire(params, texts, streams, limit, late, merge)
    metrics = found[-1].metrics, want[-1].metrics
    assert metrics[0] == metrics[1]
    assert not any(output.finished for output in found[:-1])
    if kind is RequestOutputKind.DELTA and n == 1:
        assert all(o.outputs[0].token_ids or o.finished for o in found)
    assert joined(found, kind) == joined(want, kind)


@pytest.mark.parametrize("n", [1, 2])
def test_a_text_that_fails_ends_its_sample_only(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tokenizer("byte_level_bos")
    params = SamplingParams(n=n, max_tokens=None, output_kind=RequestOutputKind.DELTA)
    received = ReceivedRequest(params, None, PROMPT, texts)
    more = None, None, None, None

    def message(tokens: list[int], *reasons: str) -> Any:
        ends = [(None, None, reason) for reason in reasons] or [()] * n
        samples = [(i, [token], *ends[i]) for i, token in enumerate(tokens[:n])]
        return "r", samples, bool(reasons), 0, more if reasons else None

    assert received.unpack(("r", message([50, 50])[1], False, 0, more)) is not None

    def fail(*given: Any) -> str:
        raise ZeroDivisionError("no text")

    for name in ("add", "stream"):
        monkeypatch.setattr(CompletionText, name, fail)
    if n == 2:
        monkeypatch.setattr(received._samples[1], "_text", None)
    assert (received.unpack(message([51, 51])) is None) == (n == 1)
    assert received.stopped == [0]
    assert (received.unpack(message([52, 52])) is None) == (n == 1)
    last = received.unpack(message([53, 53], "stop", "length"))
    assert last is not None
    assert [o.finish_reason for o in last.outputs] == ["error", "length"][:n]
    assert (last.outputs[0].stop_reason, last.outputs[0].token_ids) == ("no text", [])
    assert isinstance(last.error, ZeroDivisionError)
    assert last.outputs[0].error is last.error
