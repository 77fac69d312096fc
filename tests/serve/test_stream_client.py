"""The client with raw sockets: events, their times, kept connections, failures."""

import asyncio
import time

import pytest

from bench.serve.load import figures
from rjax.benchmarks.stream_client import (
    Address,
    Arrival,
    Streamed,
    stream_load,
    stream_load_in_processes,
)

from .live_server import LiveServer


def serve_pieces(
    pieces: list[bytes], requests: int = 1, sent: list[float] | None = None
) -> list[Streamed]:
    """What the client records of a server that sends these pieces, 20 ms apart; adds to ``sent``
    when it sent each."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            while (await reader.readline()) != b"\r\n":
                pass
            await reader.readexactly(len('{"a": 1}'))
            for piece in pieces:
                if sent is not None:
                    sent.append(time.perf_counter())
                writer.write(piece)
                await asyncio.sleep(0.02)
            if not pieces[-1].endswith(b"0\r\n\r\n"):
                break
        writer.close()

    async def run() -> list[Streamed]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            start = time.perf_counter() + 0.05
            arrivals = [Arrival(0.3 * i, "/x", {"a": 1}) for i in range(requests)]
            return await stream_load(Address(host, port), arrivals, start)

    return asyncio.run(run())


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.thorough
def test_events_and_their_times_however_they_are_cut():
    # Two events in a chunk, one over two chunks, chunks cut anywhere, a name before the data.
    stream = HEAD + (
        b"10\r\ndata: a\n\ndata: b\r\n2\r\n\n\n\r\n"
        b"17\r\nevent: e\ndata: caf\xc3\xa9!\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    )
    for cut in range(1, len(stream) - 1, 7):
        sent: list[float] = []
        (found,) = serve_pieces([stream[:cut], stream[cut:]], sent=sent)
        assert (found.status, found.ended) == (200, True)
        assert found.events == ["a", "b", "café!"]
        late = [at >= sent[1] for at in found.times]
        chunks = (b"data: a\n\n", b"b\r\n2\r\n\n\n", b"\xa9!\n\n")
        assert late == [cut < stream.index(chunk) + len(chunk) for chunk in chunks], cut


def test_connections_are_kept_and_answers_without_streams_are_read():
    body = b"HTTP/1.1 503 No\r\nContent-Length: 6\r\n\r\nbusy!!"
    (found,) = serve_pieces([body[:30], body[30:]])
    assert (found.status, found.events, found.ended) == (503, ["busy!!"], True)
    both = serve_pieces([HEAD, b"9\r\ndata: a\n\n\r\n", b"0\r\n\r\n"], requests=2)
    assert [answer.events for answer in both] == [["a"], ["a"]]


def test_an_answer_that_is_cut_off_is_not_whole():
    (found,) = serve_pieces([HEAD + b"9\r\ndata: a\n\n\r\n", b"9\r\ndata"])
    assert not found.ended
    assert found.events == ["a"]
    with pytest.raises(RuntimeError, match="an answer failed: status 200, a"):
        figures([found], 1)


@pytest.mark.slow
def test_processes_share_a_load(server: LiveServer):
    host, port = server.url.removeprefix("http://").split(":")
    body = {"model": "tiny", "prompt": "Who?", "max_tokens": 5, "ignore_eos": True, "stream": True}
    arrivals = [Arrival(0.01 * i, "/v1/completions", body) for i in range(4)]
    found = stream_load_in_processes(Address(host, int(port)), arrivals, processes=2)
    assert len(found) == 4
    result = figures(found, 5)
    assert result["chunks"] == sum(len(answer.events) for answer in found) >= 4
    assert 0 < result["gap_ms_p50"] <= result["gap_ms_max"]


EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"


@pytest.mark.parametrize("length", [True, False])
def test_streams_of_other_servers_are_read(length):
    """With a length or none, remarks, other line ends, data of several lines."""
    body = b": a remark\n\ndata:a\r\n\r\ndata: b\ndata: c\n\ndata: [DONE]\n\n"
    head = EVENTS + (b"Content-Length: %d\r\n\r\n" % len(body) if length else b"\r\n")
    (found,) = serve_pieces([head + body[:20], body[20:]])
    assert (found.status, found.events, found.ended) == (200, ["a", "b\nc"], True)
    assert found.end >= found.times[-1] > found.sent


def test_nothing_listens_and_no_http_are_errors():
    address = Address("127.0.0.1", 1)
    arrivals = [Arrival(0.0, "/", {}), Arrival(0.01, "/", {})]
    for found in asyncio.run(stream_load(address, arrivals, time.perf_counter())):
        assert (found.status, found.ended) == (0, False)
        assert found.error is not None and "no connection" in found.error
    (found,) = serve_pieces([b"SSH-2.0-x\r\n\r\n"])
    assert found.error is not None and "not HTTP" in found.error


def test_no_more_requests_than_allowed_are_under_way():
    under_way, most = 0, 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        while await reader.readline():
            while (await reader.readline()) != b"\r\n":
                pass
            await reader.readexactly(2)
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.03)
            under_way -= 1
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
        writer.close()

    async def run() -> list[Streamed]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            address = Address(*server.sockets[0].getsockname())
            arrivals = [Arrival(0.0, "/", {})] * 7
            return await stream_load(address, arrivals, time.perf_counter(), most=2)

    found = asyncio.run(run())
    assert most == 2
    assert [answer.events for answer in found] == [["x"]] * 7
    assert max(answer.sent - answer.due for answer in found) > 0.06  # its turn came late
