"""Addresses of this machine."""

import socket


def get_ip() -> str:
    """The address at which the server finds the trainer: this machine's own."""
    return "127.0.0.1"


def get_open_port() -> int:
    """A free port, whose number names the trainer's socket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
