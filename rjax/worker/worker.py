"""The worker: runs steps of one model on one mesh of devices."""

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int, UInt8, UInt32

from rjax.batch.compile_progress import CompileProgress
from rjax.batch.dispatched_step import DispatchedStep
from rjax.batch.kernel_use import KernelUse
from rjax.batch.page_operations import PageOperation, SwapInState, SwapOutState
from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.batch.sequence import Sequence as TokenSequence
from rjax.batch.step_readout import StepReadout
from rjax.batch.step_worker import StepWorker
from rjax.config import EngineConfig, Warmup
from rjax.console import bars_are_seen
from rjax.models import Decoder, LoadedModel
from rjax.models.adopting.adopter import CheckedUpdate, WeightAdopter
from rjax.models.adopting.staged import StagedTensor
from rjax.pallas_kernels.attention.plan.host import CostModel, Sharing
from rjax.sampling import SamplerMode, SlotRow
from rjax.worker.cost_model import fitted_cost_model
from rjax.worker.engine_plan import EnginePlan
from rjax.worker.fingerprint import model_fingerprint
from rjax.worker.kernels.uses import step_kernels
from rjax.worker.pages.mover import PageMover
from rjax.worker.pages.pools import page_shape
from rjax.worker.pages.sizing import host_room, size_pool
from rjax.worker.pages.state_mover import StateMover
from rjax.worker.pages.states import read_state, write_state
from rjax.worker.peer_memory import make_peer_memory
from rjax.worker.programs.cache import CompiledPrograms, open_store
from rjax.worker.programs.compile_process import lanes_starter
from rjax.worker.programs.keys import ProgramArguments, StepPrograms, multi_step_key, shapes_of
from rjax.worker.programs.source import KernelSource, ProgramSource, program_identity
from rjax.worker.programs.warmup import (
    BackgroundWarmup,
    multi_step_seconds,
    run_empty_steps,
    short_multi_step_keys,
    warmup_keys,
)
from rjax.worker.sleeping import SleepingWeights, out_of_memory
from rjax.worker.step.builder import StepInputBuilder
from rjax.worker.step.features import StepFeatures, features_of, step_features
from rjax.worker.step.layout import PackedLayouts
from rjax.worker.step.multi_step import MultiStepQueue, QueuedResult
from rjax.worker.step.multi_step_policy import MAX_PROGRAM_SECONDS, MultiStepPolicy, may_pay
from rjax.worker.step.prepare import prompt_targets
from rjax.worker.step.result import read_result, start_copy
from rjax.worker.step.runner import StepRunner, UnsampledStep
from rjax.worker.step.shape import StepShape
from rjax.worker.step.state import DeviceState, make_step_state

# A padded row costs a CPU as much as any other; a larger size than this is slower than to wait.
_CPU_PADDING = 4.0


class Worker(StepWorker):
    """Runs steps on devices; see `StepWorker` for the methods that the engine calls.

    It puts its parts together and keeps their order: `ShapeTable` chooses the step shape,
    `StepRunner` dispatches programs, `MultiStepQueue` holds decode steps back, `DeviceState` owns
    the arrays, `PageMover` copies pages and `StateMover` states. Queued steps are dispatched before
    anything else uses the device state.

    Args:
        loaded: the model.
        plan: devices, dtypes, kernels, limits and step shapes.
        policy: decides whether several decode steps run as one program, if the configuration has no
            number of them; None for one step.
        reload: loads the model again, for a wake-up without weights; None if it cannot be.

    Attributes:
        shapes: shapes of the compiled steps.
        input_builder: makes the inputs of the steps.

    Raises:
        OutOfMemoryError: the KV pool does not fit.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: EnginePlan,
        policy: MultiStepPolicy | None = None,
        reload: Callable[[], LoadedModel] | None = None,
    ) -> None:
        model, config, limits = loaded.config, plan.config, plan.limits
        backend, mesh, kv_dtype = plan.backend, plan.mesh, plan.kv_dtype
        page_size = config.cache.page_size
        self._model_config = model
        self._max_logprobs = min(config.scheduler.max_logprobs, model.vocab_size)
        self._logprobs_mode = config.scheduler.logprobs_mode
        self._progress = config.use_tqdm and bars_are_seen()
        self._kv_dtype = kv_dtype
        self._backend, self._mesh = backend, mesh
        self.shapes, groups = plan.shapes, plan.shapes.largest.groups
        graph, parameters = nnx.split(loaded.model)
        leaves, treedef = jax.tree.flatten(parameters)
        self._dtype = loaded.model.dtype
        # The fit for the dtype of the weights serves fp8 pages too.
        fitted = fitted_cost_model(backend, model, self._dtype, mesh)
        sharing = _sharing(config, fitted or backend.tuning.cost_model)
        words = self.shapes.largest.rows * model.hidden_size
        # Programs write it through its address, so it lives as long as they may run.
        self._peer_memory, peers = None, None
        if backend.dispatcher.exchanges_shares:
            self._peer_memory, peers = make_peer_memory(mesh, words)
        self.pool = size_pool(
            config.cache,
            model,
            largest=self.shapes.largest,
            itemsize=self._dtype.itemsize,
            max_model_len=plan.max_model_len,
            limits=limits,
            dtype=self._dtype,
            kv_dtype=kv_dtype,
            mesh=mesh,
        )
        self._make_state = functools.partial(
            make_step_state,
            model,
            groups,
            pool=self.pool,
            page_size=page_size,
            num_slots=limits.num_slots,
            dtype=self._dtype,
            kv_dtype=kv_dtype,
            mesh=mesh,
        )
        self._state = DeviceState(self._make_state(peers=peers))
        # If a process ended while the device still computes, XLA's threads would release the host's
        # arrays in an interpreter that is gone, and abort the process.
        self._wait_at_end = weakref.finalize(self, self._state.wait)
        number = config.scheduler.num_decode_steps
        self._policy = policy if number == "auto" else None
        if number == "auto":
            number = 1 if policy is None else policy.num_steps
        self.num_decode_steps = number
        layouts = PackedLayouts()
        pages = self.pool.num_pages if config.check_values else None
        self.input_builder = StepInputBuilder(layouts, sharing, pages)
        arguments = ProgramArguments(
            shapes_of(leaves),
            shapes_of(self._state.arrays),
            mesh,
            model.vocab_size,
            model.hidden_size,
            self._dtype,
            number,
        )
        identity = program_identity(graph, backend, arguments)
        store = open_store(identity, mesh)
        self._start_lanes = None
        if identity is not None and store is not None:
            considered = tuple([kernel.name for kernel in backend.dispatcher.kernels])
            chosen_by = backend.dispatcher.backend
            kernels = KernelSource(chosen_by, model, self._dtype, page_size, kv_dtype, considered)
            source = ProgramSource(identity, store.folder, graph, treedef, arguments, kernels)
            platform = mesh.devices.flat[0].platform
            self._start_lanes = lanes_starter(source.dumps, config.compile_processes, platform)
        programs = StepPrograms(graph, treedef, backend, mesh, layouts)
        compiled = CompiledPrograms(programs, arguments, store)
        self._runner = StepRunner(leaves, compiled, mesh, model.vocab_size, layouts)
        self._weights = SleepingWeights(self._runner, reload)
        self._background: BackgroundWarmup | None = None
        self._queue = MultiStepQueue(self._runner, self._state, number, self._policy)
        self.num_host_pages, self.num_host_states = host_room(config.cache, self.pool)
        self._mover = PageMover(
            num_pages=self.pool.num_pages,
            shape=page_shape(model, groups, page_size),
            num_pools=2 * groups.num_pools,
            num_slots=self.num_host_pages,
            dtype=kv_dtype,
            mesh=mesh,
        )
        self._state_mover = StateMover(self.num_host_states, mesh)

    @property
    def num_compiled(self) -> int:
        """Step programs made so far."""
        return len(self._runner.programs)

    @property
    def kv_dtype(self) -> jnp.dtype:
        return self._kv_dtype

    @property
    def page_shape(self) -> tuple[int, ...]:
        return self._mover.page_shape

    def check_weights(self, tensors: Mapping[str, StagedTensor], *, partial: bool) -> CheckedUpdate:
        return self._adopter.check(tensors, self._runner.leaves, partial=partial)

    def adopt_weights(self, update: CheckedUpdate) -> None:
        self._queue.flush()
        self._adopter.commit(update, self._runner.leaves)

    @functools.cached_property
    def _adopter(self) -> WeightAdopter:
        abstract = Decoder(self._model_config, self._dtype)
        return WeightAdopter(abstract, self._model_config, self._mesh)

    def kernels(self) -> list[KernelUse]:
        return [
            use
            for rows in dict.fromkeys(shape.rows for shape in self.shapes.all)
            for use in step_kernels(
                rows,
                model=self._model_config,
                dtype=self._dtype,
                kv_dtype=self._kv_dtype,
                page_size=self.shapes.all[0].page_size,
                backend=self._backend,
                devices=self._mesh.size,
                peers=shapes_of(self._state.arrays.peers),
            )
        ]

    def fingerprint(self) -> str:
        several = bool(self.shapes.largest.groups.layers_a_page)
        return model_fingerprint(
            self._model_config,
            self._runner.leaves,
            devices_of_pages=self._mesh.size if several else 1,
        )

    def compile_progress(self) -> CompileProgress:
        if self._background is not None:
            return self._background.compiler.progress()
        count, runner = self.num_compiled, self._runner
        total = count + runner.waiting
        return CompileProgress(count, total, runner.waits, waiting=runner.waiting)

    def close(self) -> None:
        if self._background is not None:
            self._background.compiler.close()
        self._wait_at_end()

    def warmup(
        self, when: Warmup = "on", modes: Sequence[SamplerMode] = ("greedy", "random", "full")
    ) -> None:
        """Compile every step shape in these modes of the sampler, the sampling of logprobs, the
        admission of a sequence, the copies of pages, and the prompt logprobs of the largest step.
        Those of others are compiled once they are asked for, while larger steps serve."""
        if when == "auto":
            when = "off" if self._mesh.devices.flat[0].platform == "cpu" else "background"
        match when:
            case "on":  # with a policy, those of several steps follow, of the steps that are short
                background = self._compile(modes, several=self._policy is None)
                background.compiler.wait()
                self._run_empty(modes, background)
            case "background":
                weight_bytes = sum(leaf.nbytes for leaf in self._runner.leaves) // self._mesh.size
                several = self._policy is None or may_pay(weight_bytes, self.num_decode_steps)
                self._compile(modes, several=several)

    def sleep(self, level: int) -> None:
        self._queue.flush()
        self._state.wait()
        self._weights.sleep(level)
        self._mover.forget()
        self._state_mover.forget()
        self._state.drop()

    def wake_up(self, tag: str) -> None:
        if tag == "weights":
            self._weights.wake_up()
            return
        with out_of_memory("the KV pool"):
            self._state.arrays = self._make_state(peers=self._state.arrays.peers)
            jax.block_until_ready(self._state.arrays)

    def admit(self, rows: Mapping[int, SlotRow]) -> None:
        self._queue.flush()
        self._state.admit(rows)

    def move(self, operations: list[PageOperation]) -> None:
        self._queue.flush()
        of_states = [each for each in operations if isinstance(each, SwapOutState | SwapInState)]
        of_kv = [each for each in operations if not isinstance(each, SwapOutState | SwapInState)]
        self._state.set_pools(self._mover.run(self._state.pools, of_kv))
        self._state.set_states(self._state_mover.run(self._state.arrays.states, of_states))

    def measure_page_seconds(self) -> float:
        return self._mover.page_seconds()

    def read_pages(self, pages: list[int]) -> np.ndarray:
        self._queue.flush()
        return self._mover.read(self._state.pools, pages)

    def write_pages(self, pages: list[int], data: np.ndarray) -> None:
        self._queue.flush()
        self._state.set_pools(self._mover.write(self._state.pools, pages, data))

    def read_state(self, page: int) -> UInt8[np.ndarray, " X"]:
        self._queue.flush()
        return read_state(self._state.arrays.states, page)

    def write_state(self, page: int, data: UInt8[np.ndarray, " X"]) -> None:
        self._queue.flush()
        self._state.set_states(write_state(self._state.arrays.states, page, data))

    def is_ready(self, sequence: TokenSequence) -> bool:
        background = self._background
        if background is None:
            return True
        features = features_of(sequence, self._max_logprobs)
        return all([background.is_ready(self.shapes.largest, each) for each in features])

    def dispatch(
        self,
        batch: list[ScheduledSequence],
        tables: Int[np.ndarray, "groups slots pages"],
        *,
        may_queue: bool,
        streams: bool,
    ) -> DispatchedStep:
        rows = sum([item.stop - item.start for item in batch])
        features = step_features(batch, self._max_logprobs)
        shape = self._choose_shape(rows, len(batch), features)
        made = self.input_builder.build(batch, tables, shape)
        batch, packed, stats = made.batch, made.packed, made.stats
        if may_queue and rows == len(batch) and self._queue.takes(features):
            several = self._runs_several(shape, features, streams)
            start = self._queue.add if several else self._queue.run_alone
            result = start(shape, features, packed)
            return DispatchedStep(batch, result, stats, rows, is_queued=result.result is None)
        self._queue.flush()
        targets = prompt_targets(batch, shape.rows) if features.num_prompt_logprobs else None
        if features.sampling == "full" and any(
            item.samples and item.sequence.mask is not None for item in batch
        ):
            unsampled = self._runner.run_forward(self._state, shape, features, packed, targets)
            return DispatchedStep(batch, unsampled, stats, rows, forward_only=True)
        result = self._runner.run(self._state, shape, features, packed, targets)
        return DispatchedStep(batch, start_copy(result), stats, rows)

    def _compile(self, modes: Sequence[SamplerMode], *, several: bool) -> BackgroundWarmup:
        """Compile all programs; also those of several decode steps if ``several``."""
        padding_is_cheap = self._backend.spare_rows > 0
        keys = warmup_keys(
            self.shapes,
            modes,
            num_decode_steps=self.num_decode_steps if several else 1,
            num_logprobs=self._max_logprobs,
            processed_logprobs=self._logprobs_mode == "processed_logprobs",
            spare_rows=self._backend.spare_rows,
        )
        self._background = BackgroundWarmup(
            self._runner.programs,
            keys,
            math.inf if padding_is_cheap else _CPU_PADDING,
            copies=self._mover.programs(shapes_of(self._state.pools))
            + self._state_mover.programs(shapes_of(self._state.arrays.states)),
            start_lanes=self._start_lanes,
            progress=self._progress,
        )
        weakref.finalize(self, self._background.compiler.close)
        return self._background

    def _run_empty(self, modes: Sequence[SamplerMode], background: BackgroundWarmup) -> None:
        self._queue.flush()
        run_empty_steps(self._runner, self._state, self.shapes, modes)
        self._state.set_pools(self._mover.warmup(self._state.pools))
        self._state.set_states(self._state_mover.warmup(self._state.arrays.states))
        if self._policy is None:
            return
        keys = short_multi_step_keys(
            self._runner,
            self._state,
            self.shapes,
            modes,
            num_decode_steps=self.num_decode_steps,
            seconds=MAX_PROGRAM_SECONDS,
        )
        for key in keys:
            background.compile(key)
        background.compiler.wait()
        for key in keys:
            seconds = multi_step_seconds(self._runner, self._state, key, self.num_decode_steps)
            self._policy.measured(key, seconds)
        self._policy.allow_only(keys)

    def _runs_several(self, shape: StepShape, features: StepFeatures, streams: bool) -> bool:
        """Whether decode steps are queued to run as one program, which is compiled in the
        background once it pays."""
        key = multi_step_key(shape, features)
        if self._policy is not None and not self._policy.pays(key, streams=streams):
            return False
        if self._background is None or self._background.compiler.is_compiled(key):
            return True
        if self._policy is not None and self._policy.pays_to_compile(key):
            self._background.compile(key)
        return False

    def _choose_shape(self, rows: int, seqs: int, features: StepFeatures) -> StepShape:
        """The smallest shape for the batch, or a larger one while that is being compiled."""
        fitting = self.shapes.fitting(rows=rows, seqs=seqs)
        if self._background is None:
            return fitting[0]
        return self._background.choose(fitting, features)

    def sample(
        self, step: DispatchedStep, bitmasks: Mapping[int, UInt32[np.ndarray, " W"]]
    ) -> DispatchedStep:
        self._queue.flush()
        unsampled: UnsampledStep = step.result
        bitmask = self._runner.bitmask(unsampled.rows.shape[1])
        for b, row in bitmasks.items():
            bitmask[b] = row
        result = self._runner.sample(self._state, unsampled, bitmask)
        return dataclasses.replace(step, result=start_copy(result), forward_only=False)

    def read(self, step: DispatchedStep) -> StepReadout:
        self._queue.flush()
        if self._policy is not None and self._is_unsteady(step):
            self._policy.interrupt()
        if isinstance(step.result, QueuedResult):
            return self._queue.read(step.result)
        return read_result(step.result)

    def _is_unsteady(self, step: DispatchedStep) -> bool:
        """Whether the time to read a step says nothing about decode steps: it is none, or programs
        compile meanwhile, and take the host's time."""
        if not isinstance(step.result, QueuedResult) or step.result.program is None:
            return True
        progress = self.compile_progress()
        return progress.compiled < progress.total


def _sharing(config: EngineConfig, cost_model: CostModel) -> Sharing:
    """Which shared pages the attention plan reads once."""
    match config.relay.mode:
        case "auto":
            return cost_model
        case "on":
            return "on"
        case "off":
            return "off"
