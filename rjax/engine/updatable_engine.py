"""The methods of an engine that give it new weights."""

import abc
from typing import Any

from rjax.batch.step_worker import StepWorker
from rjax.closing import Closable
from rjax.engine.protocol import Engine, RunningMode
from rjax.engine.weight_updates import WeightUpdates
from rjax.errors import EnginePausedError, EngineSleepingError
from rjax.models import ModelConfig
from rjax.models.adopting.mapping import WeightMapping
from rjax.outputs import RequestOutput


class UpdatableEngine(Closable, Engine):
    """An engine with `WeightUpdates`; see `WeightEngine` for the methods.

    A subclass sets ``model_config``, ``_weights``, ``_worker``, and ``_pending_outputs``, the
    outputs that `step` returns next.
    """

    model_config: ModelConfig | None
    _weights: WeightUpdates
    _worker: StepWorker
    _pending_outputs: list[RequestOutput]

    @property
    def weights_version(self) -> int:
        return self._weights.version

    def start_weight_update(
        self, *, partial: bool = False, mapping: str | WeightMapping | None = None
    ) -> None:
        self._check_open()
        self._weights.start(partial=partial, mapping=mapping, model=self.model_config)

    def add_weights(self, items: Any) -> None:
        self._check_open()
        self._weights.add(items)

    def try_finish_weight_update(self, mode: RunningMode = "wait") -> int | None:
        self._check_open()
        try:
            self._check_takes_weights()
            running = self._weights.check(mode, self._worker)
            if mode == "wait" and running:
                self._check_finishing()
                return None
        except (EnginePausedError, EngineSleepingError):
            self._weights.cancel()
            raise
        if mode == "abort":
            for request_id in running:
                self.abort_request(request_id)
        self._read_in_flight()
        self._weights.commit(self._worker)
        return self.weights_version

    def finish_weight_update(self, mode: RunningMode = "wait") -> int:
        outputs: list[RequestOutput] = []
        while (version := self.try_finish_weight_update(mode)) is None:
            outputs += self.step()
        self._pending_outputs = outputs + self._pending_outputs
        return version

    def cancel_weight_update(self) -> None:
        self._check_open()
        self._weights.cancel()

    @abc.abstractmethod
    def _check_takes_weights(self) -> None:
        """Check that there are weights, which do not sleep."""

    @abc.abstractmethod
    def _check_finishing(self) -> None:
        """Check that running requests go on, before a wait for them."""

    @abc.abstractmethod
    def _read_in_flight(self) -> None:
        """Read all steps that are dispatched; their outputs become pending."""

    def _check_open(self) -> None:
        super()._check_open()
        self._weights.check_usable()
