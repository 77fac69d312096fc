"""Main loop of a worker process."""

import logging
import socket
from typing import Any

from rjax.errors import ContextLengthError, InvalidRequestError
from rjax.serve.workers import frames
from rjax.serve.workers.memory import resident_bytes
from rjax.serve.workers.tasks import Tasks

_log = logging.getLogger("rjax.serve.workers")


def work(tasks: Tasks, source: socket.socket) -> None:
    """Run tasks one at a time until the socket is closed.

    The object of each result has ``grown``, the growth of the process's memory in bytes, and on
    failure ``error``: "invalid" or "context" (a `ContextLengthError`), with ``message`` for the
    client, "memory" or "internal".
    """
    first = resident_bytes()
    while (message := frames.receive(source)) is not None:
        found, data = _run(tasks, *message)
        source.sendall(frames.pack(found | {"grown": resident_bytes() - first}, data))


def _run(tasks: Tasks, head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        return tasks.run(head, data)
    except ContextLengthError as error:
        return {"error": "context", "message": str(error)}, b""
    except InvalidRequestError as error:
        return {"error": "invalid", "message": str(error)[:2000]}, b""
    except MemoryError:
        return {"error": "memory"}, b""
    except Exception:
        _log.exception("a task failed")
        return {"error": "internal"}, b""
