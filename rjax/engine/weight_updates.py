"""New weights in a running engine: a transaction, and what becomes of requests and of KV."""

import dataclasses
from typing import Any, get_args, no_type_check

from rjax.batch.page_hash import kept_key
from rjax.engine.kv_events.event_stream import KvEventStream
from rjax.engine.live_requests import LiveRequests
from rjax.engine.named_prefixes import NamedPrefixes
from rjax.engine.page_roots import PageRoots
from rjax.engine.protocol import RunningMode
from rjax.engine.scheduler import Scheduler
from rjax.errors import EngineDeadError, InvalidWeightsError, without_frames
from rjax.models import CheckpointError, ModelConfig
from rjax.models.adopting.mapping import NameMap, WeightMapping, flat_items
from rjax.models.adopting.mappings import named_mapping
from rjax.models.adopting.staged import StagedTensor, staged_tensors

_UPDATE = "update"  # why the scheduler holds new requests


@dataclasses.dataclass(slots=True)
class _Transaction:
    """An update that is not finished.

    Attributes:
        partial: whether tensors may be missing.
        names: names of the tensors.
        tensors: the tensors so far.
        checked: the update as the worker has checked it; None before.
    """

    partial: bool
    names: NameMap
    tensors: dict[str, StagedTensor] = dataclasses.field(default_factory=dict)
    checked: Any = None


class WeightUpdates:
    """The state of updates of an engine's weights.

    What arrives is referred to and changes nothing before `check`, which checks it as a whole, and
    `commit`. Every error cancels the update, and the old weights stay in use.

    Args:
        roots: root keys of page hashes, which get the new version.
        scheduler: the scheduler of running requests.
        live: the requests under way.
        prefixes: named prefixes, whose KV is computed again when they are first used.
        kv_events: is told of new roots.

    Attributes:
        failure: the error that left some weights new and some old; the engine is of no use then.
    """

    def __init__(
        self,
        roots: PageRoots,
        scheduler: Scheduler,
        live: LiveRequests,
        prefixes: NamedPrefixes,
        kv_events: KvEventStream,
    ) -> None:
        self.failure: Exception | None = None
        self._roots = roots
        self._scheduler, self._live, self._prefixes = scheduler, live, prefixes
        self._kv_events = kv_events
        self._open: _Transaction | None = None

    @property
    def version(self) -> int:
        """Number of updates so far."""
        return self._roots.weights_version

    def check_usable(self) -> None:
        """Raise EngineDeadError if an update has failed half-way."""
        if self.failure is not None:
            raise EngineDeadError(
                f"an update of the weights failed half-way ({self.failure}), so that some are new "
                "and some old; make a new engine, or restart the server"
            )

    @no_type_check  # user input is checked by hand, with readable messages
    def start(
        self, *, partial: bool, mapping: str | WeightMapping | None, model: ModelConfig | None
    ) -> None:
        """Begin an update; see `WeightEngine.start_weight_update`."""
        if self._open is not None:
            raise InvalidWeightsError(
                "an update of the weights is under way; finish or cancel it before the next"
            )
        if not isinstance(partial, bool):
            raise InvalidWeightsError(f"partial is {partial!r}; it must be True or False")
        try:
            self._open = _Transaction(partial, NameMap(named_mapping(mapping, model)))
        except CheckpointError as error:
            raise InvalidWeightsError(str(error)) from error

    def add(self, items: Any) -> None:
        """Stage arrays; see `WeightEngine.add_weights`."""
        update = self._started()
        try:
            new = staged_tensors(flat_items(items), update.names)
            twice = sorted(new.keys() & update.tensors.keys())
            if twice:
                raise CheckpointError(f"{twice[0]} was added before; give each tensor once")
        except CheckpointError as error:
            self.cancel()
            raise InvalidWeightsError(str(error)) from error
        except BaseException:  # of an iterator of the trainer
            self.cancel()
            raise
        update.tensors |= new

    def check(self, mode: RunningMode, worker: Any) -> list[str]:
        """Check the update as a whole; with "wait", no request starts from now on.

        Args:
            mode: what is to happen to running requests.
            worker: the `StepWorker` that holds the weights.

        Returns:
            Ids of the running requests.

        Raises:
            InvalidWeightsError: the update does not fit the model.
        """
        update = self._started()
        try:
            if mode not in get_args(RunningMode):
                raise CheckpointError(
                    f"mode is {mode!r}; it must be one of {', '.join(get_args(RunningMode))}"
                )
            if update.checked is None:
                tensors, update.tensors = update.tensors, {}
                update.checked = worker.check_weights(tensors, partial=update.partial)
        except CheckpointError as error:
            self.cancel()
            raise InvalidWeightsError(str(error)) from error
        except BaseException:
            self.cancel()
            raise
        if mode == "wait":
            self._scheduler.holds_new.add(_UPDATE)
        return self._running()

    def cancel(self) -> None:
        """Drop what has arrived; nothing happens without an update."""
        self._open = None
        self._scheduler.holds_new.discard(_UPDATE)

    def _started(self) -> _Transaction:
        if self._open is None:
            raise InvalidWeightsError(
                "no update of the weights is under way, or an error has cancelled it; start one"
            )
        return self._open

    def _running(self) -> list[str]:
        """Ids of the requests that have KV."""
        live = self._live.by_id.items()
        return [name for name, r in live if r.sequences[0].num_cached is not None]

    def commit(self, worker: Any) -> None:
        """Replace the weights, when no step is in flight. Requests that run keep their KV.

        Raises:
            EngineDeadError: the devices failed half-way.
        """
        update = self._started()
        self.cancel()
        try:
            worker.adopt_weights(update.checked)
        except Exception as error:
            self.failure = without_frames(error)
            self.check_usable()
        self.start_version()

    def start_version(self) -> None:
        """Count other weights as a new version: no KV from before is found any more."""
        self._roots.weights_version += 1
        running = set(self._running())
        self._prefixes.forget_kv(running, self._roots.of)
        self._kv_events.add_root(self._roots.of(None))
        self._scheduler.blocks.forget_all()  # and the states behind them
        for name, request in self._live.by_id.items():
            new = None if name in running else self._roots.of(request.cache_salt)
            for sequence in request.sequences:
                root = new or kept_key(sequence.hashes.parent(0))
                self._scheduler.registrar.start_chain(sequence, root)
            for completion in request.completions:
                completion.new_weights(self.version)
