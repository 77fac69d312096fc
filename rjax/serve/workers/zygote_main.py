"""Main loop of the zygote process: loads models, forks workers and ends them."""

import gc
import json
import os
import signal
import socket
from collections import OrderedDict
from typing import Any

from rjax.serve.workers import frames
from rjax.serve.workers.memory import bound_memory
from rjax.serve.workers.tasks import Tasks, TextModel
from rjax.serve.workers.worker import work

_MOST_MODELS = 4


def main(control_fd: int) -> None:
    """Serve the control socket until the server closes it; then kill every worker."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends when the server closes the socket
    import transformers  # noqa: F401  # before the first fork

    with socket.socket(fileno=control_fd) as control:
        workers: set[int] = set()
        models: OrderedDict[str, Tasks] = OrderedDict()
        try:
            while (message := _receive(control)) is not None:
                head, fds = message
                match head["task"]:
                    case "fork":
                        answer = _fork(head, fds[0], control, workers, models)
                        control.sendall(frames.pack(answer))
                    case "reap":
                        answer = {"status": _end(head["pid"], workers)}
                        control.sendall(frames.pack(answer))
                    case "end":
                        _end(head["pid"], workers)
        finally:
            for pid in list(workers):
                _end(pid, workers)


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """A message and the file descriptors that came with its first byte."""
    first, fds, _, _ = socket.recv_fds(control, 1, 1)
    if not first:
        return None
    sizes = first + _exactly(control, frames.SIZES.size - 1)
    head, data = frames.SIZES.unpack(sizes)
    return json.loads(_exactly(control, head + data)[:head]), fds


def _exactly(source: socket.socket, size: int) -> bytes:
    found = frames.receive_exactly(source, size)
    if found is None:
        raise ConnectionError("the server closed the control socket inside a message")
    return found


def _fork(
    head: dict[str, Any],
    fd: int,
    control: socket.socket,
    workers: set[int],
    models: OrderedDict[str, Tasks],
) -> dict[str, Any]:
    with socket.socket(fileno=fd) as source:
        key = json.dumps(head["model"])
        try:
            if key not in models:
                models[key] = Tasks(TextModel(**head["model"]))
        except Exception as error:  # the server reports it to the operator
            return {"error": f"{type(error).__name__}: {error}"}
        models.move_to_end(key)
        while len(models) > _MOST_MODELS:
            models.popitem(last=False)
        gc.collect()
        gc.freeze()  # garbage collection in workers would copy pages shared with the zygote
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or too little memory
            return {"error": f"{type(error).__name__}: {error}"}
        if pid == 0:
            status = 1
            try:
                control.close()
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                bound_memory(head["more_bytes"])
                work(models[key], source)
                status = 0
            finally:
                os._exit(status)
    workers.add(pid)
    return {"pid": pid}


def _end(pid: int, workers: set[int]) -> int | None:
    """Kill a worker unless it has ended, and return its exit code or the negative number of the
    signal that ended it."""
    if pid not in workers:
        return None
    workers.remove(pid)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
