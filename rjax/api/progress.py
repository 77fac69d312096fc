"""The progress bar of a batch."""

import time
from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm

from rjax.console import bars_are_seen
from rjax.outputs import RequestOutput


class Progress:
    """A bar over requests, with input and output tokens a second; shown once there is any.

    Args:
        use_tqdm: False shows nothing, True a bar where it is seen; a callable is used in tqdm's
            place.
        total: number of requests.
    """

    def __init__(self, use_tqdm: bool | Callable[..., Any], total: int) -> None:
        self._start = time.monotonic()
        self._read = self._written = 0
        self._bar: Any = None
        own = tqdm if use_tqdm and bars_are_seen() else None
        self._make = use_tqdm if callable(use_tqdm) else own
        self._total = total

    def show(self) -> None:
        """Draw the bar, if it is not there yet."""
        if self._bar is None and self._make:
            self._bar = self._make(
                total=self._total,
                desc="Processed prompts",
                dynamic_ncols=True,
                postfix=self._postfix(0.0, 0.0),
            )

    def count(self, output: RequestOutput) -> None:
        """Count a request that is done; the bar must be there."""
        self._read += len(output.prompt_token_ids)
        self._written += sum(len(o.token_ids) for o in output.outputs)
        if self._bar is not None:
            seconds = max(time.monotonic() - self._start, 1e-9)
            self._bar.postfix = self._postfix(self._read / seconds, self._written / seconds)
        self.advance(1)

    def advance(self, requests: int) -> None:
        """Move the bar."""
        self.show()
        if self._bar is not None and requests:
            self._bar.update(requests)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    @staticmethod
    def _postfix(read: float, written: float) -> str:
        return f"est. speed input: {read:.2f} toks/s, output: {written:.2f} toks/s"
