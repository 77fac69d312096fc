"""The conversation and its slash commands."""

import contextlib
import io
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rjax.chat.backends import ChatBackend, Reasoning, ResponseStats
from rjax.chat.sampling_values import with_value
from rjax.chat.spinner import spinning
from rjax.errors import RjaxError

_HELP = """\
/reset           clear the conversation; the system message stays
/system TEXT     set the system message and clear the conversation; without TEXT, show it
/undo            take back the last question and its answer
/set NAME VALUE  sampling, such as /set temperature 0.7 or /set top_p default; alone, show them
/save FILE       write the conversation as JSON
/load FILE       go on with a conversation that /save wrote
/stats           show or hide statistics after each answer
/help            this
/exit            leave (also Ctrl-D)
A line that ends in a backslash goes on in the next one; \"\"\" begins and ends a block of lines.
Ctrl-C stops an answer, whose text so far stays in the conversation. Twice, it ends the chat."""


class Session:
    """One conversation in a terminal.

    Args:
        backend: generates the answers.
        system: the system message, or None.
        out: stream of the answers.
        notes: stream of all other output, reasoning included.
        show_stats: whether to print statistics after each answer.
        stoppable: whether Ctrl-C stops an answer; otherwise KeyboardInterrupt ends the session.

    Attributes:
        messages: the conversation without its system message.
        failed: whether a question or a command failed.
    """

    def __init__(
        self,
        backend: ChatBackend,
        system: str | None = None,
        *,
        out: io.TextIOBase | None = None,
        notes: io.TextIOBase | None = None,
        show_stats: bool = True,
        stoppable: bool = True,
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self.failed = False
        self._stoppable = stoppable
        self._backend = backend
        self._system = system
        self._out: Any = out or sys.stdout
        self._notes: Any = notes or sys.stderr
        self._show_stats = show_stats
        self._commands: dict[str, Callable[[str], bool]] = {
            "/reset": self._reset,
            "/system": self._set_system,
            "/undo": self._undo,
            "/set": self._set,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/help": self._help,
            "/exit": lambda _: False,
            "/quit": lambda _: False,
        }

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The system message, if any, and all messages after it."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self.messages]

    def take(self, line: str) -> bool:
        """Run one turn: a question or a command. Return False to leave."""
        text = line.strip()
        if not text:
            return True
        if text.startswith("/"):
            name, _, rest = text.partition(" ")
            command = self._commands.get(name)
            if command is None:
                self._fail(f"there is no {name}; /help lists the commands")
                return True
            return command(rest.strip())
        self._ask(text)
        return True

    def _ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})
        stats = ResponseStats()
        pieces: list[str] = []
        try:
            with spinning(self._notes) as spinner, self._thinking() as think:
                for piece in self._backend.answer(self.conversation, stats):
                    if piece:
                        spinner.stop()
                    if isinstance(piece, Reasoning):
                        think(piece)
                        continue
                    think(None)
                    pieces.append(piece)
                    self._out.write(piece)
                    self._out.flush()
        except RjaxError as error:
            self._end_line(pieces)
            self._fail(f"error: {error}")
            if not pieces:
                self.messages.pop()  # drop the question
                return
        except KeyboardInterrupt:
            stats.stopped = True
        self._end_line(pieces)
        if stats.stopped and not self._stoppable:
            raise KeyboardInterrupt
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        if stats.stopped:
            self._note("stopped")
        if self._show_stats:
            self._note(f"({stats.line()})")

    @contextlib.contextmanager
    def _thinking(self) -> Iterator[Callable[[str | None], None]]:
        """A function that writes pieces of reasoning beside the answer, dimmed in a terminal. None,
        or the end of the block, ends their line."""
        dim = self._notes.isatty()
        begun = False

        def think(piece: str | None) -> None:
            nonlocal begun
            if piece is not None:
                self._notes.write(f"\x1b[2m{piece}\x1b[0m" if dim else piece)
            elif begun:
                self._notes.write("\n")
            self._notes.flush()
            begun = piece is not None

        try:
            yield think
        finally:
            think(None)

    def _end_line(self, pieces: list[str]) -> None:
        if pieces:
            self._out.write("\n")
            self._out.flush()

    def _reset(self, _: str) -> bool:
        self.messages.clear()
        self._note("the conversation is forgotten")
        return True

    def _set_system(self, text: str) -> bool:
        if not text:
            self._note(self._system or "there is no system message")
            return True
        self._system = text
        return self._reset("")

    def _undo(self, _: str) -> bool:
        if not self.messages:
            self._note("there is nothing to take back")
        while self.messages and self.messages.pop()["role"] != "user":
            pass
        return True

    def _save(self, path: str) -> bool:
        if not path:
            self._fail("name a file: /save FILE")
            return True
        record = {"model": self._backend.name, "messages": self.conversation}
        try:
            text = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
            pathlib.Path(path).expanduser().write_text(text, encoding="utf-8")
            self._note(f"saved {len(self.conversation)} messages in {path}")
        except (OSError, ValueError) as error:
            self._fail(f"error: not saved: {error}")
        return True

    def _load(self, path: str) -> bool:
        if not path:
            self._fail("name a file: /load FILE")
            return True
        try:
            system, messages = read_conversation(pathlib.Path(path).expanduser())
        except (OSError, ValueError) as error:
            self._fail(f"error: not loaded: {error}")
            return True
        self._system, self.messages = system, messages
        self._note(f"loaded {len(self.conversation)} messages from {path}")
        return True

    def _set(self, given: str) -> bool:
        name, _, value = given.partition(" ")
        if not name:
            values = ", ".join(f"{key} {value}" for key, value in self._backend.sampling.items())
            self._note(values or "nothing is set; the model's defaults apply")
            return True
        if not value.strip():
            self._fail("give a value: /set NAME VALUE, or /set NAME default")
            return True
        try:
            changed = with_value(self._backend.sampling, name, value.strip())
            self._backend.set_sampling(changed)
        except RjaxError as error:
            self._fail(f"error: {error}")
            return True
        self._note(f"{name} is {value.strip()}")
        return True

    def _stats(self, _: str) -> bool:
        self._show_stats = not self._show_stats
        self._note(f"figures are {'shown' if self._show_stats else 'hidden'}")
        return True

    def _help(self, _: str) -> bool:
        self._note(_HELP)
        return True

    def _fail(self, text: str) -> None:
        self.failed = True
        self._note(text)

    def _note(self, text: str) -> None:
        dim = self._notes.isatty()
        print(f"\x1b[2m{text}\x1b[0m" if dim else text, file=self._notes, flush=True)


def read_conversation(path: pathlib.Path) -> tuple[str | None, list[dict[str, str]]]:
    """The system message, if any, and the other messages of a file that ``/save`` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ValueError(f'{path} is no conversation; give a file with {{"messages": [...]}}')
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    rest = messages[1:] if system is not None else messages
    return system, [{"role": m["role"], "content": m["content"]} for m in rest]


def _is_message(found: Any) -> bool:
    return isinstance(found, dict) and all(
        isinstance(found.get(key), str) for key in ("role", "content")
    )
