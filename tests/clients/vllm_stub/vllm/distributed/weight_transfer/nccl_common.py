"""The trainer's end of the connection to the server."""

from typing import Any

from vllm.shared_memory import Sender


def trainer_init(init_info: dict[str, Any]) -> Sender:
    """Wait for the server, which `/init_weight_transfer_engine` tells of ``master_port``."""
    return Sender(int(init_info["master_port"]))
