"""The group of TRL's older client: the server and the trainer."""

from vllm.shared_memory import Sender


class StatelessProcessGroup:
    """The trainer's connection to the server. Sending a tensor waits until it has arrived, so that
    there is nothing left to wait for."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender

    @classmethod
    def create(cls, host: str, port: int, rank: int, world_size: int) -> "StatelessProcessGroup":
        """Wait for the server."""
        return cls(Sender(port))

    def barrier(self) -> None:
        """Return at once."""
