"""The terminal chat: commands, Ctrl-C, a local model and a server give the same answers."""

import http.server
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rjax.chat.backends import LocalBackend, Reasoning, RemoteBackend, ResponseStats
from rjax.chat.session import Session
from rjax.chat.spinner import spinning
from rjax.chat.turns import read_turn
from rjax.commands import chat
from rjax.commands.chat import main
from rjax.errors import InvalidConfigError, InvalidRequestError
from tests.slow_steps import slow_steps

from .live_server import OPTIONS, LiveServer, make_engine

GREEDY = {"temperature": 0, "max_tokens": 8}
HI = [{"role": "user", "content": "Who lives in Peru?"}]


class Echo:
    """Answers with the question, or fails or stops when told to."""

    name = "echo"

    def __init__(self) -> None:
        self.sampling: dict[str, Any] = {}

    def set_sampling(self, sampling) -> None:
        self.sampling = dict(sampling)

    def answer(self, messages, stats: ResponseStats) -> Iterator[str]:
        text = messages[-1]["content"]
        if text == "fail":
            raise InvalidRequestError("cannot say")
        for count, word in enumerate(text.split()):
            stats.tokens = count + 1
            if word == "^C":
                raise KeyboardInterrupt
            if word.startswith("?"):
                yield Reasoning(word)
                continue
            yield word + " "


def session(**more) -> tuple[Session, io.StringIO, io.StringIO]:
    out, notes = io.StringIO(), io.StringIO()
    return Session(Echo(), out=out, notes=notes, **more), out, notes


def test_commands(tmp_path):
    chat, out, notes = session(system="be kind")
    for line in ("one two", "", "  ", "three"):
        assert chat.take(line)
    assert out.getvalue() == "one two \nthree \n"
    assert [m["role"] for m in chat.conversation] == ["system", *["user", "assistant"] * 2]
    chat.take("/undo")
    assert [m["content"] for m in chat.messages] == ["one two", "one two "]
    chat.take(f"/save {tmp_path / 'c.json'}")
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved == {"model": "echo", "messages": chat.conversation}
    chat.take("/system be brief")
    assert chat.conversation == [{"role": "system", "content": "be brief"}]
    chat.take("four")
    chat.take("/reset")
    assert chat.conversation == [{"role": "system", "content": "be brief"}]
    for line in ("/nothing", "/help", "/save", f"/save {tmp_path}/no/such/dir", "/undo", "/system"):
        assert chat.take(line)
    assert not chat.take("/exit")
    assert "no /nothing" in notes.getvalue()
    assert "not saved" in notes.getvalue()


def test_statistics_can_be_hidden():
    chat, _, notes = session()
    chat.take("one")
    assert "1 tokens" in notes.getvalue()
    chat.take("/stats")
    before = notes.getvalue()
    chat.take("two")
    assert notes.getvalue() == before


def test_reasoning_is_shown_beside_the_answer():
    chat, out, notes = session(show_stats=False)
    chat.take("?Let ?me ?see yes indeed")
    assert notes.getvalue() == "?Let?me?see\n"
    assert out.getvalue() == "yes indeed \n"
    assert chat.messages[-1]["content"] == "yes indeed "
    chat.take("?hm ^C")
    assert notes.getvalue().endswith("?hm\nstopped\n")
    notes.isatty = lambda: True
    chat.take("?Let yes")
    assert "\x1b[2m?Let\x1b[0m\n" in notes.getvalue()


class Thinking(http.server.BaseHTTPRequestHandler):
    """A server whose model reasons before it answers."""

    deltas = (
        *({"role": "assistant", "content": ""}, {"reasoning": "Let", "reasoning_content": "Let"}),
        *({"reasoning_content": " me"}, {"content": "Yes"}, {"content": "."}),
    )

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for delta in self.deltas:
            event = {"choices": [{"index": 0, "delta": delta}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_):
        pass


def test_reasoning_of_a_server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Thinking)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stats = ResponseStats()
    try:
        backend = RemoteBackend(f"http://127.0.0.1:{server.server_port}", "m", None, {})
        pieces = [(type(piece), str(piece)) for piece in backend.answer(HI, stats)]
    finally:
        server.shutdown()
        server.server_close()
    assert pieces == [(Reasoning, "Let"), (Reasoning, " me"), (str, "Yes"), (str, ".")]
    assert stats.tokens == 4
    assert stats.first is not None


def test_stopped_answer_stays_and_failed_question_goes():
    chat, out, notes = session()
    chat.take("one two ^C three")
    assert out.getvalue() == "one two \n"
    assert chat.messages[-1] == {"role": "assistant", "content": "one two "}
    assert "stopped" in notes.getvalue()
    chat.take("fail")
    assert "cannot say" in notes.getvalue()
    assert len(chat.messages) == 2
    chat.take("on")
    assert len(chat.messages) == 4


def whole(backend, messages=HI) -> tuple[str, ResponseStats]:
    stats = ResponseStats()
    return "".join(backend.answer(messages, stats)), stats


@pytest.fixture(scope="module")
def local(folder) -> LocalBackend:
    return LocalBackend(make_engine(folder), "tiny", GREEDY)


def test_local_and_remote_agree(server: LiveServer, local):
    remote = RemoteBackend(server.url, None, None, GREEDY)
    assert remote.name == "tiny"
    mine, its = whole(local), whole(remote)
    assert mine[0] == its[0] != ""
    for _, stats in (mine, its):
        assert stats.tokens == 8
        assert stats.prompt_tokens > 4
        assert 0 < stats.first <= stats.seconds
        assert not stats.stopped


def interrupt_after(seconds: float) -> threading.Thread:
    def interrupt() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal: a test run in a shell's background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.sample(0, 1)
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("where", ["local", "remote"])
def test_ctrl_c_stops_the_answer_and_frees_it(server: LiveServer, folder, where):
    endless = {"temperature": 1, "max_tokens": 490, "ignore_eos": True, "seed": 1}
    if where == "local":
        backend = LocalBackend(make_engine(folder), "tiny", endless)
        engine = backend._engine
    else:
        backend = RemoteBackend(server.url, "tiny", None, endless)
        engine = server.service.engine.engine
    stats = ResponseStats()
    pieces = []
    thread = None
    with slow_steps(engine, 0.02):
        for piece in backend.answer(HI, stats):
            pieces.append(piece)
            if thread is None:
                thread = interrupt_after(0.02)
        thread.join()
    assert stats.stopped
    assert 0 < len(pieces) < 490
    if where == "local":
        assert not backend._engine.has_unfinished_requests()
    else:
        server.wait_idle()
    assert whole(backend)[1].tokens == 490  # and the next answer is whole


def test_errors_of_a_conversation_are_told(server: LiveServer, local):
    long = [{"role": "user", "content": "a b c d " * 400}]
    with pytest.raises(InvalidRequestError):
        whole(local, long)
    with pytest.raises(InvalidRequestError):
        whole(RemoteBackend(server.url, "tiny", None, GREEDY), long)
    assert whole(local)[1].tokens == 8


@pytest.mark.parametrize("argv", [
    ["--url", "ftp://x"],
    ["--url", "127.0.0.1:8000"],
    ["--url", "http://127.0.0.1:1/v1"],
    ["--url", "http://127.0.0.1:1/v1", "--num-pages", "3"],
    ["--api-key-file", "/no/such/file"],
    ["--temperature", "9"],
    ["-n", "2"],
    ["--logprobs", "2"],
    ["--system", "a", "--system-file", "b"],
])  # fmt: skip
def test_bad_input_is_one_line(argv, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def test_bad_url_is_no_config():
    with pytest.raises(InvalidConfigError):
        RemoteBackend("nothing", None, None, {})


def test_command_answers_a_line_each(folder, monkeypatch, capsys):
    argv = ["--model", str(folder), "--temperature", "0"]
    for name in ("load_format", "page_size", "num_pages", "max_num_seqs", "max_num_batched_tokens"):
        argv += ["--" + name.replace("_", "-"), str(OPTIONS[name])]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n/system\nWhere?\n/exit\nnever\n"))
    assert main([*argv, "--max-tokens", "4", "--system", "be kind"]) == 0
    out, err = capsys.readouterr()
    assert out
    assert "be kind" in err
    assert err.count("(4 tokens") == 2


def piped(monkeypatch, text: str | io.TextIOBase, backend=None) -> int:
    """The status of the command over lines of stdin, answered by ``Echo``."""
    monkeypatch.setattr(chat, "_backend", lambda *_, **__: backend or Echo())
    monkeypatch.setattr(sys, "stdin", io.StringIO(text) if isinstance(text, str) else text)
    return main(["--no-stats"])


@pytest.mark.parametrize("line", ["fail", "/unknown", "/save", "/save /no/such/folder/file"])
def test_an_error_in_a_pipe_is_told_by_the_status(monkeypatch, capsys, line):
    assert piped(monkeypatch, f"one\n{line}\ntwo") == 1
    out, err = capsys.readouterr()
    assert out == "one \ntwo \n", "the other lines are answered"
    assert err.count("\n") == 1
    assert piped(monkeypatch, "one\n\n/reset\ntwo\n") == 0
    assert piped(monkeypatch, "") == 0


def test_a_pipe_that_is_not_text_is_bad_input(monkeypatch, capsys):
    assert piped(monkeypatch, io.TextIOWrapper(io.BytesIO(b"one\n\xff\n"), "utf-8")) == 2
    assert capsys.readouterr().err == "rjax chat: error: stdin: not UTF-8 text; convert it\n"


def test_ctrl_c_ends_what_is_piped(monkeypatch, capsys):
    assert piped(monkeypatch, "one ^C\ntwo\n") == 130
    out, err = capsys.readouterr()
    assert out == "one \n"
    assert err == "rjax chat: interrupted\n"


@pytest.mark.parametrize("name", ["tables", "tiny"])
def test_the_bundled_model_is_given_a_table(monkeypatch, capsys, name):
    monkeypatch.setattr(RemoteBackend, "_first_model", lambda self: name)

    def system(*options: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("/system\n/exit\n"))
        assert main(["--url", "http://127.0.0.1:1", *options]) == 0
        return capsys.readouterr().err

    assert ("| name |" in system()) == (name == "tables")
    assert system("--system", "be kind") == "be kind\n"
    assert system("--model", "tables") == "there is no system message\n"


def turns(text: str) -> list[str]:
    """The turns of these lines."""
    lines = iter(text.splitlines())
    found = []
    while (turn := read_turn(lambda prompt: next(lines, None))) is not None:
        found.append(turn)
    return found


def test_a_turn_can_have_several_lines():
    assert turns("one\ntwo") == ["one", "two"]
    assert turns("one\\\ntwo\\\nthree\nfour") == ["one\ntwo\nthree", "four"]
    assert turns('"""\na\n\n b\n"""\nc') == ["a\n\n b", "c"]
    assert turns('"""a\nb"""\n"""c"""\n  """\nd\n"""  ') == ["a\nb", "c", "d"]
    assert turns("a\\\n") == ["a"]
    assert turns('"""\nnot closed') == ["not closed"]


def test_a_pipe_has_turns_of_several_lines(monkeypatch, capsys):
    assert piped(monkeypatch, 'one\\\ntwo\n"""\nthree\nfour\n"""\n') == 0
    assert capsys.readouterr().out == "one two \nthree four \n"


def test_a_saved_conversation_goes_on(tmp_path):
    chat, _, _ = session(system="be kind")
    path = tmp_path / "c.json"
    for turn in ("one", f"/save {path}", "/system be brief", "two"):
        chat.take(turn)
    chat.take(f"/load {path}")
    assert [m["content"] for m in chat.conversation] == ["be kind", "one", "one "]
    chat.take("three")
    assert len(chat.messages) == 4
    assert not chat.failed
    for text in ("[]", "{}", '{"messages": [1]}', "{", '{"messages": [{"role": "user"}]}'):
        path.write_text(text)
        chat, _, notes = session()
        chat.take(f"/load {path}")
        assert chat.failed
        assert notes.getvalue().startswith("error: not loaded: ")


def test_sampling_can_be_set(local):
    chat, _, notes = session()
    for turn in ("/set", "/set temperature 0.7", "/set max-tokens 5", "/set stop END", "/set"):
        chat.take(turn)
    assert chat._backend.sampling == {"temperature": 0.7, "max_tokens": 5, "stop": ["END"]}
    chat.take("/set temperature default")
    assert "temperature" not in chat._backend.sampling
    assert not chat.failed
    before = chat._backend.sampling
    for turn, said in (
        ("/set temprature 1", "did you mean temperature?"),
        ("/set temperature 9", "temperature is 9"),
        ("/set temperature", "give a value"),
        ("/set n 2", "there is no sampling value 'n'"),
    ):
        chat.take(turn)
        assert said in notes.getvalue().splitlines()[-1]
    assert chat.failed
    assert chat._backend.sampling == before
    local.set_sampling(GREEDY | {"max_tokens": 3})
    assert whole(local)[1].tokens == 3
    local.set_sampling(GREEDY)


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.thorough
def test_a_spinner_runs_until_the_first_piece():
    notes = Terminal()
    with spinning(notes) as spinner:
        time.sleep(0.5)
        spinner.stop()
        drawn = notes.getvalue()
        time.sleep(0.2)
    assert "0 s, Ctrl-C stops" in drawn
    assert drawn.endswith("\r\x1b[2K"), "the line is erased"
    assert notes.getvalue() == drawn
    pipe = io.StringIO()
    with spinning(pipe):
        time.sleep(0.3)
    assert pipe.getvalue() == ""
