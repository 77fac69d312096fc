"""The main function of the engine process, which `rjax.engine_channel.process_channel` starts.

SIGINT and SIGTERM are for the front end, which drains; this process ends when the front end closes
the socket or ends. Ignores the signals before it imports anything large.
"""

import os
import signal
import sys
import traceback

_IGNORED = (signal.SIGINT, signal.SIGTERM)


def main(fd: int) -> None:
    """Serve the front end at the other end of this socket, and end the process."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)  # blocked by the front end until here
    import socket

    from rjax.console import quiet_imports
    from rjax.tokenization.without_torch import leave_torch_out

    quiet_imports()
    leave_torch_out()
    from rjax.engine_channel.engine_server import EngineServer

    try:
        status = EngineServer(socket.socket(fileno=fd)).run()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without waiting for programs that compile in the background
