"""Outputs that the front end does not read in time are merged, and nothing waits for it."""

import socket
import time

import pytest

from rjax.engine_channel.message_sender import MessageSender
from rjax.engine_channel.messages import Beat, MessageReader, Reply, Step
from rjax.engine_channel.received_request import ReceivedRequest
from rjax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams

STEPS = 20_000


def output(name: str, tokens: list[int], finished: bool) -> RequestOutput:
    completion = CompletionOutput(0, "x" * len(tokens), tokens)
    completion.finish_reason = "length" if finished else None
    metrics = RequestMetrics(1.0, num_generated_tokens=STEPS if finished else 0)
    return RequestOutput(name, None, [1, 2], None, [completion], finished, metrics)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_a_full_socket_merges_outputs(kind):
    ours, theirs = socket.socketpair()
    delta = kind is RequestOutputKind.DELTA
    steps = STEPS
    with ours, theirs:
        sender = MessageSender(ours)
        for name in ("a", "b"):
            sender.open_request(name, 2)
        sender.open_request("refused", 2)
        sender.close_request("refused")
        slowest = 0.0
        for i in range(steps):
            start = time.perf_counter()
            sender.send_outputs([output(n, [i], i == steps - 1) for n in ("a", "b")])
            slowest = max(slowest, time.perf_counter() - start)
            if i == steps // 2:
                sender.send(Reply(7, "held"))
                sender.send(Beat(1.0))
        assert slowest < 5
        assert len(sender._held) == 2
        sender.send_outputs([output("unknown", [1], True)])
        assert len(sender._unsent) < 2**20

        params = SamplingParams(output_kind=kind, max_tokens=steps)
        requests = {n: ReceivedRequest(params, "text", [1, 2], None) for n in ("a", "b")}
        got: dict[str, list[int]] = {"a": [], "b": []}
        reader, num_outputs, others, last = MessageReader.of_events(), 0, [], {}
        theirs.settimeout(20)
        while len(last) < 2:
            for message in reader.feed(theirs.recv(2**16)):
                if not isinstance(message, Step):
                    others.append(message)
                    continue
                for packed in message.outputs:
                    found = requests[packed[0]].unpack(packed)
                    assert found is not None
                    num_outputs += 1
                    more = found.outputs[0].token_ids
                    got[found.request_id] = got[found.request_id] + more if delta else more
                    if found.finished:
                        last[found.request_id] = found
        assert got == {"a": list(range(steps)), "b": list(range(steps))}
        assert num_outputs < steps
        assert others == [Reply(7, "held")]  # a beat is dropped while the socket is full
        assert last["a"].metrics.num_generated_tokens == STEPS
        assert (last["a"].prompt, last["a"].prompt_token_ids) == ("text", [1, 2])
        sender.flush(1.0)
        assert not sender._requests


def test_a_closed_socket_stops_nothing():
    ours, theirs = socket.socketpair()
    with ours:
        sender = MessageSender(ours)
        sender.open_request("a", 2)
        theirs.close()
        for i in range(10):
            sender.send_outputs([output("a", [i], False)])
            sender.send(Reply(i))
        sender.flush(1.0)
