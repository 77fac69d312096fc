"""Outputs on their way to a reader: in order, merged where it is behind, cut where it stays so."""

import asyncio
from typing import Any

import pytest

from rjax.engine_channel.output_queue import OutputQueue
from rjax.errors import OverloadedError
from rjax.outputs import CompletionOutput, Logprob, RequestOutput
from rjax.sampling import RequestOutputKind

DELTA, CUMULATIVE, FINAL = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)


def output(name: str, token: int, *, finished: bool = False, **more: Any) -> RequestOutput:
    reason = "length" if finished else None
    made = []
    for index, sampled in enumerate((token, -token)):
        own = {name: list(value) if name == "logprobs" else value for name, value in more.items()}
        made.append(CompletionOutput(index, f"{sampled},", [sampled], finish_reason=reason, **own))
    return RequestOutput(name, None, [1], outputs=made, finished=finished)


def read(queue: OutputQueue, count: int) -> list[RequestOutput]:
    async def take() -> list[RequestOutput]:
        return [await asyncio.wait_for(queue.get(), 60) for _ in range(count)]

    return asyncio.run(take())


def test_a_reader_in_time_gets_each_output():
    queue = OutputQueue(DELTA, 100)
    for round in range(50):
        for name in "ab":
            queue.put(output(name, round))
        assert [(o.request_id, o.outputs[0].token_ids) for o in read(queue, 2)] == [
            ("a", [round]),
            ("b", [round]),
        ]


def test_a_late_reader_gets_all_tokens_in_one_output():
    queue = OutputQueue(DELTA, 10**6)
    for i in range(1000):
        entry = {i: Logprob(-0.5, 1)}
        queue.put(output("a", i, finished=i == 999, logprobs=[entry], cumulative_logprob=-0.5 * i))
        if i % 10 == 0:
            queue.put(output("b", i, finished=i == 990))
    found = read(queue, 2)
    assert not queue._outputs
    for one, name, tokens in zip(found, "ab", ([*range(1000)], [*range(0, 1000, 10)]), strict=True):
        assert one.request_id == name
        assert one.outputs[0].token_ids == tokens
        assert one.outputs[1].token_ids == [-t for t in tokens]
        assert one.outputs[0].text == "".join(f"{t}," for t in tokens)
        assert one.finished
        assert one.outputs[0].finish_reason == "length"
    logprobs = found[0].outputs[0].logprobs or []
    assert [next(iter(entry)) for entry in logprobs] == [*range(1000)]


def test_of_cumulative_outputs_the_last_one_is_enough():
    queue = OutputQueue(CUMULATIVE, 10)
    for i in range(100):
        queue.put(output("a", i))
        queue.put(output("b", -i))
    found = [(o.request_id, o.outputs[0].token_ids) for o in read(queue, 2)]
    assert found == [("a", [99]), ("b", [-99])]
    assert not queue._outputs
    queue.put(output("a", 7))
    assert read(queue, 1)[0].outputs[0].token_ids == [7]


@pytest.mark.parametrize("alternatives", [0, 4])
def test_a_reader_that_stays_behind_is_cut(alternatives):
    queue = OutputQueue(DELTA, 100)
    entry = {i: Logprob(-0.5, 1) for i in range(alternatives)}
    more = {"logprobs": [entry]} if alternatives else {}
    fits = 100 // (2 * (1 + alternatives))
    for i in range(fits):
        queue.put(output("a", i, **more))
    with pytest.raises(OverloadedError, match="more than 100 tokens"):
        queue.put(output("a", 99, **more))
    queue.put(output("a", 100, **more))
    assert not queue._outputs  # nothing is kept
    with pytest.raises(OverloadedError, match="read faster"):
        read(queue, 1)


def test_what_was_read_makes_room():
    queue = OutputQueue(DELTA, 10)
    for i in range(1000):
        queue.put(output("a", i))
        if i % 4 == 3:
            assert read(queue, 1)[0].outputs[0].token_ids == [*range(i - 3, i + 1)]


def test_a_whole_answer_has_no_bound():
    queue = OutputQueue(FINAL, 10)
    for name in "abc":
        long = CompletionOutput(0, "", [1] * 1000, finish_reason="length")
        queue.put(RequestOutput(name, None, [1], outputs=[long], finished=True))
    assert len(read(queue, 3)) == 3


def test_an_error_comes_after_what_was_there():
    queue = OutputQueue(DELTA, 10)
    queue.put(output("a", 1))
    queue.fail(ValueError("so"))
    assert read(queue, 1)[0].outputs[0].token_ids == [1]
    with pytest.raises(ValueError, match="so"):
        read(queue, 1)
