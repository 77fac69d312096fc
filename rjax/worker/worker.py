"""The worker: weights, pools and compiled steps on one mesh of devices."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from models import LoadedModel
from pallas_kernels.attention.planner import CostModel, PlanStats, Sharing, choose_kv_split_size
from rjax.config import EngineConfig
from rjax.engine.page_operations import PageOperation
from rjax.engine.schedule import ScheduledSequence
from rjax.engine.sequence import SequenceStatus
from rjax.engine.step_limits import StepLimits
from rjax.sampling import SamplerMode, SlotRow, admit, compile_admission, init_state
from rjax.worker.backend import Backend
from rjax.worker.batch_order import by_shared_pages
from rjax.worker.compile_ahead import compile_ahead
from rjax.worker.cost_model import fitted_cost_model
from rjax.worker.gathered_steps import GatheredResult, GatheredSteps, StepKind
from rjax.worker.kv_cache import PoolSize, check_pool_fits, fit_pool, make_pools, page_bytes
from rjax.worker.page_mover import PageMover, Pools
from rjax.worker.programs import StepPrograms
from rjax.worker.readout import StepReadout, read_result
from rjax.worker.step import StepResult, StepState
from rjax.worker.step_input import build_step_input, check_step_input
from rjax.worker.step_shape import ShapeTable, StepFeatures, StepShape, step_features

_MOST_HOST_POOLS = 8  # host pages are at most so many times those of the device
_SAMPLED = 64  # values of each weight in the model's fingerprint
_PROMPT_ROWS = 512  # whose logits there is room for: several blocks of what a step holds at once
_ALL = 0xFFFFFFFF  # of 32 tokens all may be sampled
_FIRST_RUNS = 2  # of a program: XLA makes its CUDA graph in the second


@dataclasses.dataclass(frozen=True, slots=True)
class DispatchedStep:
    """A step that runs on the device; ``result`` arrives when it is done.

    Attributes:
        batch: the sequences, in the order of the result's rows.
        result: a StepResult on the device, for the worker that made it to read.
        stats: what its attention reads.
        num_tokens: rows computed.
        held: whether it waits for ``Worker.sample``, and its result with it.
    """

    batch: list[ScheduledSequence]
    result: Any
    stats: PlanStats
    num_tokens: int
    held: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Unsampled:
    """What is left of a step in parts: its input, and its HeldStep."""

    shape: StepShape
    features: StepFeatures
    packed: Int[np.ndarray, " Z"]
    step: Any


class Worker:
    """Runs steps. Knows nothing of requests, only of scheduled runs of tokens."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        backend: Backend,
        kv_dtype: jnp.dtype,
        mesh: Mesh,
        max_model_len: int,
        limits: StepLimits,
        growth: int,
    ) -> None:
        self._mesh, self._limits = mesh, limits
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._max_logprobs = config.scheduler.max_logprobs
        self._model_config = loaded.config
        self._vocab_size = loaded.config.vocab_size
        self._progress = config.use_tqdm
        self._check_values = config.check_values
        page_size = config.cache.page_size

        # Joined cuts are equal within rounding; without them sharing changes no bit.
        joining = backend.joining if config.relay.mode == "auto" else None

        def cut_of(rows: int) -> int:
            unit = config.relay.relay_split_tokens or max(backend.cut_of(rows), page_size)
            return choose_kv_split_size(max_model_len, unit, joining)

        self.shapes = ShapeTable(
            limits=limits,
            max_model_len=max_model_len,
            page_size=page_size,
            item_rows=backend.item_rows,
            cut_of=cut_of,
            padded_rows=backend.padded_rows if mesh.size == 1 else lambda rows: rows,
            joining=joining,
            growth=growth,
        )
        graph, state = nnx.split(loaded.model)
        self._leaves, treedef = jax.tree.flatten(state)
        self._programs = StepPrograms(graph, treedef, backend, mesh)
        self._unmasked: dict[int, jax.Array] = {}
        self._gathered = GatheredSteps(config.scheduler.num_decode_steps)
        self._kv_dtype = kv_dtype
        dtype = jnp.result_type(*(leaf.dtype for leaf in self._leaves))
        # For fp8 pages too: the one of the weights' dtype.
        fitted = fitted_cost_model(backend, loaded.config, dtype, mesh)
        self._sharing: Sharing = _sharing(config, fitted or backend.cost_model)
        self.pool = self._pool_size(loaded, config, max_model_len)
        self._state = self._make_state(loaded, config, self.pool.num_pages)
        self.num_host_pages = min(
            config.cache.swap_bytes // self.pool.page_bytes,
            _MOST_HOST_POOLS * self.pool.num_pages,
        )
        self._mover = PageMover(
            num_pages=self.pool.num_pages,
            shape=(loaded.config.num_kv_heads, page_size, loaded.config.head_dim),
            num_pools=2 * loaded.config.num_layers,
            num_slots=self.num_host_pages,
            dtype=self._kv_dtype,
            mesh=mesh,
        )

    @property
    def num_compiled(self) -> int:
        """Programs of steps so far."""
        return len(self._programs)

    def admit(self, slot: int, row: SlotRow) -> None:
        """Fill one slot of the sampling state for a new sequence, leaving nothing of the last."""
        self._state = dataclasses.replace(
            self._state, sampling=admit(self._state.sampling, slot, row)
        )

    def move(self, operations: list[PageOperation]) -> None:
        """Start these copies of pages, in their order, before the next step."""
        pools = self._mover.run(self._pools, operations)
        self._set_pools(pools)

    @property
    def kv_dtype(self) -> jnp.dtype:
        """Of the KV pool."""
        return self._kv_dtype

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of one page as ``read_pages`` gives it: (pools, K, S, H)."""
        return self._mover.page_shape

    def fingerprint(self) -> str:
        """Names the model by its configuration and a sample of every weight."""
        digest = hashlib.sha256(repr(self._model_config).encode())
        for leaf in self._leaves:
            step = max(1, leaf.size // _SAMPLED)
            digest.update(np.asarray(jnp.ravel(leaf)[::step]).tobytes())
        return digest.hexdigest()

    def warmup(self, modes: Sequence[SamplerMode] = ("greedy", "random", "full")) -> None:
        """Compile every step size in these modes of the sampler, the admission of a sequence to a
        slot, and the copies of pages.

        Sampling with logprobs is rarer and compiled when it is first asked for. The steps run
        on an empty batch, and change nothing.
        """
        features = [StepFeatures(mode, 0, False) for mode in modes]
        wanted = [(shape, wants) for shape in self.shapes.all for wants in features]
        programs = self._programs
        tables = np.zeros((1, self.shapes.largest.table_pages), np.int32)
        inputs = {}
        for shape in self.shapes.all:
            step_input, _ = build_step_input([], tables, shape, "off")
            inputs[shape] = programs.layout(shape).pack(step_input)
        calls = [
            ((programs.held if programs.in_parts(wants) else programs.whole), shape, wants, 1)
            for shape, wants in wanted
        ]
        if self._gathered.count > 1:
            calls += [
                (programs.several, shape, wants, self._gathered.count)
                for shape, wants in wanted
                if shape in self.shapes.decode and not programs.in_parts(wants)
            ]
        lowered = (
            make(shape, wants).lower(
                self._leaves,
                self._state,
                inputs[shape] if count == 1 else np.stack([inputs[shape]] * count),
            )
            for make, shape, wants, count in calls
        )
        compile_ahead(lowered, len(calls), title="Compiling steps", progress=self._progress)
        for shape, wants in wanted:
            for _ in range(_FIRST_RUNS):
                jax.block_until_ready(self._run(shape, wants, inputs[shape]))
        self._state = dataclasses.replace(
            self._state, sampling=compile_admission(self._state.sampling, self._vocab_size)
        )
        self._set_pools(self._mover.warmup(self._pools, progress=self._progress))

    def measure_page_seconds(self) -> float:
        """Time to bring one page to the host or back, as this machine does it now."""
        return self._mover.page_seconds()

    def read_pages(self, pages: list[int]) -> np.ndarray:
        """The KV in these pages, [X, pools, K, S, H]."""
        return self._mover.read(self._pools, pages)

    def write_pages(self, pages: list[int], data: np.ndarray) -> None:
        """Put KV into these pages."""
        self._set_pools(self._mover.write(self._pools, pages, data))

    def dispatch(
        self, batch: list[ScheduledSequence], tables: Int[np.ndarray, "slots pages"]
    ) -> DispatchedStep:
        """Start a step and return at once. Where a mask has to be laid on its samples, it is held
        until ``sample``, and computes all that comes before that. Decode steps of one shape start
        ``num_decode_steps`` together, or as many as there are once anything else is wanted.

        Args:
            batch: in any order; the step's own is that of the result.
            tables: row s lists the pages of the sequence in slot s.
        """
        rows = sum([item.stop - item.start for item in batch])
        shape = self.shapes.choose(rows=rows, seqs=len(batch))
        batch = by_shared_pages(
            batch, tables, page_size=shape.page_size, split_tokens=shape.plan.kv_split_size
        )
        step_input, stats = build_step_input(batch, tables, shape, self._sharing)
        if self._check_values:
            check_step_input(
                step_input, batch, num_pages=self.pool.num_pages, page_size=shape.page_size
            )
        features = step_features(batch, min(self._max_logprobs, self._vocab_size))
        # The program takes it to the device: a call of its own for that costs the host more.
        packed = self._programs.layout(shape).pack(step_input)
        if (
            self._gathered.count > 1
            and rows == len(batch)
            and not self._programs.in_parts(features)
        ):
            return DispatchedStep(batch, self._gather((shape, features), packed), stats, rows)
        if features.sampling == "full" and any(
            item.samples and item.sequence.mask is not None for item in batch
        ):
            result = self._run_held(shape, features, packed)
            return DispatchedStep(batch, result, stats, rows, held=True)
        result = self._run(shape, features, packed)
        return DispatchedStep(batch, _on_its_way(result), stats, rows)

    def sample(self, step: DispatchedStep) -> DispatchedStep:
        """Sample a step that is held, under the masks that its sequences have now."""
        unsampled: _Unsampled = step.result
        words = np.full((unsampled.shape.seqs, -(-self._vocab_size // 32)), _ALL, np.uint32)
        for b, (sequence, _, _, samples, _) in enumerate(step.batch):
            if not samples or sequence.mask is None:
                continue
            if sequence.status is not SequenceStatus.FINISHED:
                words[b] = sequence.mask.words
        result = self._sample(unsampled, jax.device_put(words, self._everywhere))
        return dataclasses.replace(step, result=_on_its_way(result), held=False)

    def read(self, step: DispatchedStep) -> StepReadout:
        """Wait for a step and copy its result to the host."""
        self._start_gathered()
        if not isinstance(step.result, GatheredResult):
            return read_result(step.result)
        found = step.result.result
        if isinstance(found, StepResult):
            return read_result(found)
        return StepReadout(np.asarray(found)[step.result.index], None, None)

    @property
    def _state(self) -> StepState:
        """As every step that was dispatched leaves it."""
        self._start_gathered()
        return self._started_state

    @_state.setter
    def _state(self, state: StepState) -> None:
        self._started_state = state

    def _gather(self, kind: StepKind, packed: Int[np.ndarray, " Z"]) -> GatheredResult:
        if not self._gathered.takes(kind):
            self._start_gathered()
        result = self._gathered.add(kind, packed)
        if self._gathered.full:
            self._start_gathered()
        return result

    def _start_gathered(self) -> None:
        if not self._gathered:
            return
        together = self._gathered.full
        (shape, features), inputs, results = self._gathered.take()
        if together:
            program = self._programs.several(shape, features)
            self._state, found = program(self._leaves, self._state, np.stack(inputs))
            found.copy_to_host_async()
            for index, result in enumerate(results):
                result.result, result.index = found, index
            return
        for packed, result in zip(inputs, results, strict=True):
            result.result = _on_its_way(self._run(shape, features, packed))

    @property
    def _pools(self) -> Pools:
        return [*self._state.k_pages, *self._state.v_pages]

    def _set_pools(self, pools: Pools) -> None:
        layers = len(pools) // 2
        self._state = dataclasses.replace(
            self._state, k_pages=pools[:layers], v_pages=pools[layers:]
        )

    def _run(
        self, shape: StepShape, features: StepFeatures, packed: Int[np.ndarray, " Z"]
    ) -> StepResult:
        if self._programs.in_parts(features):
            if shape.seqs not in self._unmasked:
                words = np.full((shape.seqs, -(-self._vocab_size // 32)), _ALL, np.uint32)
                self._unmasked[shape.seqs] = jax.device_put(words, self._everywhere)
            unsampled = self._run_held(shape, features, packed)
            return self._sample(unsampled, self._unmasked[shape.seqs])
        program = self._programs.whole(shape, features)
        self._state, result = program(self._leaves, self._state, packed)
        return result

    def _run_held(
        self, shape: StepShape, features: StepFeatures, packed: Int[np.ndarray, " Z"]
    ) -> _Unsampled:
        program = self._programs.held(shape, features)
        self._state, held = program(self._leaves, self._state, packed)
        return _Unsampled(shape, features, packed, held)

    def _sample(self, unsampled: _Unsampled, words: jax.Array) -> StepResult:
        state = self._state
        sampling, last_tokens, result = self._programs.sampling(
            unsampled.shape, unsampled.features
        )(state.sampling, state.last_tokens, unsampled.packed, unsampled.step, words)
        self._state = dataclasses.replace(state, sampling=sampling, last_tokens=last_tokens)
        return result

    def _make_state(self, loaded: LoadedModel, config: EngineConfig, num_pages: int) -> StepState:
        slots = self._limits.num_slots
        k_pages, v_pages = make_pools(
            loaded.config, num_pages, config.cache.page_size, self._kv_dtype, self._mesh
        )
        sampling, last = jax.device_put(
            (init_state(slots, self._vocab_size), jnp.zeros(slots, jnp.int32)), self._everywhere
        )
        return StepState(k_pages, v_pages, sampling, last)

    def _pool_size(self, loaded: LoadedModel, config: EngineConfig, max_model_len: int) -> PoolSize:
        size = config.cache.page_size
        bytes_per_page = page_bytes(loaded.config, size, self._kv_dtype)
        device = self._mesh.devices.flat[0]
        if config.cache.num_pages is not None:
            pool = PoolSize(config.cache.num_pages, bytes_per_page)
            check_pool_fits(pool, memory=device.memory_stats(), num_devices=self._mesh.size)
            return pool
        return fit_pool(
            bytes_per_page=bytes_per_page,
            page_size=size,
            max_model_len=max_model_len,
            num_seqs=self._limits.num_slots,
            memory=device.memory_stats(),
            num_devices=self._mesh.size,
            utilization=config.cache.gpu_memory_utilization,
            workspace_bytes=0 if device.platform == "cpu" else self._workspace(loaded, config),
        )

    def _workspace(self, loaded: LoadedModel, config: EngineConfig) -> int:
        """Bytes a largest step needs besides weights and pool, as its compiler says, and room for
        the logprobs of prompts, with which it would be slow to compile."""
        shape = self.shapes.largest
        features = StepFeatures("full", min(self._max_logprobs, self._vocab_size), False)
        state = self._make_state(loaded, config, 1)
        layout = self._programs.layout(shape)
        packed = np.zeros(layout.size, np.int32)
        # In one program it takes no less than in parts.
        step = self._programs.whole(shape, features)
        compiled = step.lower(self._leaves, state, packed).compile()
        analysis = compiled.memory_analysis()
        prompt_logits = _PROMPT_ROWS * self._vocab_size * np.dtype(np.float32).itemsize
        return int(
            analysis.temp_size_in_bytes + analysis.generated_code_size_in_bytes + prompt_logits
        )


def _on_its_way(result: StepResult) -> StepResult:
    for leaf in jax.tree.leaves(result):
        leaf.copy_to_host_async()
    return result


def _sharing(config: EngineConfig, cost_model: CostModel) -> Sharing:
    match config.relay.mode:
        case "auto":
            return cost_model
        case "on":
            return "on"
        case "off":
            return "off"
