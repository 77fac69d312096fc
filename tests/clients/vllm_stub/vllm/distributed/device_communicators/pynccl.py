"""The communicator of TRL's older client."""

from typing import Any

import torch

from vllm.distributed.utils import StatelessProcessGroup


class PyNcclCommunicator:
    """Sends one tensor at a time."""

    def __init__(self, group: StatelessProcessGroup, device: Any) -> None:
        self.group = group

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send a tensor to the server."""
        self.group.sender.send([tensor])
