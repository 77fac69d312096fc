"""A model with random weights, its decode steps and their times."""

import dataclasses
import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from bench.ceilings import Ceilings
from bench.decode_step.roofline import DecodeCase, roofline_seconds
from bench.decode_step.rows import Row
from bench.kernels.kernel_profile import kernel_times
from bench.kernels.timing import burst_seconds, seconds_per_call
from rjax.batch.page_groups import one_group, with_states
from rjax.models import ModelConfig, config_from_dict, init_model
from rjax.models.loading.config import with_quantization
from rjax.models.sharding import TENSOR_AXIS, parameter_sharding
from rjax.pallas_kernels.attention.plan.host import (
    Sharing,
    plan_attention,
)
from rjax.pallas_kernels.gated_delta.states import StateRows
from rjax.sampling import SamplerMode, init_state
from rjax.worker.backend import Backend, choose_backend
from rjax.worker.pages.states import make_states
from rjax.worker.peer_memory import make_peer_memory
from rjax.worker.programs.cache import compiler_options
from rjax.worker.programs.keys import StepPrograms, multi_step_key, step_key
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.input import GroupInput, StepInput
from rjax.worker.step.layout import PackedLayouts
from rjax.worker.step.result import StepResult
from rjax.worker.step.shape import StepShape
from rjax.worker.step.state import StepState
from rjax.worker.step.state_rows import empty_state_rows, write_state_rows

PEER_ROWS = 512  # rows whose shares fit the exchange buffers

_STARTED = re.compile(r" (?:fusion|custom-call|dot|copy|sort|scatter|gather|convolution)\(")


def step_shape(
    case: DecodeCase,
    backend: Backend,
    model: ModelConfig,
    *,
    page_size: int,
    relay: str,
    max_model_len: int | None = None,
) -> StepShape:
    """The step shape of a case, for a given maximum sequence length or the length of the case."""
    longest, rows = max_model_len or case.context, backend.padded_rows(case.batch)
    plan = backend.plan_shape(
        rows,
        case.batch,
        longest,
        page_size,
        coalesce=relay == "auto",
        unpadded_rows=case.batch,
    )
    has_state = tuple([model.is_linear(layer) for layer in range(model.num_layers)])
    groups = with_states(one_group(has_state.count(False)), has_state)
    return StepShape(
        rows,
        case.batch,
        -(-longest // page_size),
        page_size,
        groups,
        (plan,),
        one_row_each=groups.num_state_layers > 0,
    )


class Bench:
    """A model with random weights, and steps over it."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        backend: str,
        page_size: int,
        relay: str,
        mode: Any,
        dtype: str | None = None,
        quantization: str | None = None,
        max_model_len: int | None = None,
        devices: int = 1,
        num_decode_steps: int = 1,
        without: str | None = None,
    ) -> None:
        self.config: ModelConfig = with_quantization(config_from_dict(config), quantization)
        self.quantization = quantization
        self.max_model_len = max_model_len
        self.num_decode_steps = num_decode_steps
        self.page_size, self.relay = page_size, relay
        self.mode: SamplerMode = mode
        self.mesh = Mesh(np.array(jax.devices()[:devices]), (TENSOR_AXIS,))
        device = self.mesh.devices.flat[0]
        capability = getattr(device, "compute_capability", None)
        natural = self.config.dtype if device.platform == "gpu" else "float32"
        self.dtype = jnp.dtype(dtype or natural)
        self.backend: Backend = choose_backend(
            backend,
            platform=device.platform,
            compute_capability=None if capability is None else float(capability),
            model=self.config,
            dtype=self.dtype,
            page_size=page_size,
            devices=devices,
        )
        if without is not None:
            try:
                dispatcher = self.backend.dispatcher.without(without)
            except ValueError as error:
                raise SystemExit(f"--without: {error}") from None
            self.backend = dataclasses.replace(self.backend, dispatcher=dispatcher)
        peer_words = PEER_ROWS * self.config.hidden_size
        self.peer_memory, self.peers = None, None
        if self.backend.dispatcher.exchanges_shares:
            self.peer_memory, self.peers = make_peer_memory(self.mesh, peer_words)
        model = init_model(self.config, dtype=self.dtype, mesh=self.mesh)
        self.graph, weights = nnx.split(model)
        self.leaves, self.treedef = jax.tree.flatten(weights)

    def compiled(self, case: DecodeCase) -> tuple[Any, StepState, Array]:
        """The compiled program, a state with random KV, and the packed input of its steps."""
        shape = step_shape(
            case,
            self.backend,
            self.config,
            page_size=self.page_size,
            relay=self.relay,
            max_model_len=self.max_model_len,
        )
        features = StepFeatures(self.mode)
        several, model = self.num_decode_steps > 1, (self.graph, self.treedef)
        programs = StepPrograms(*model, self.backend, self.mesh, PackedLayouts())
        key = multi_step_key(shape, features) if several else step_key(shape)
        batch = self._input(case, shape)
        state = self._state(case.batch, int(batch.groups[0].pages[0].max()) + 1)
        packed = programs.layouts[shape].pack(batch)
        if several:
            packed = np.stack([packed] * self.num_decode_steps)
        packed = jax.device_put(packed, NamedSharding(self.mesh, PartitionSpec()))
        lowered = programs.get(key).lower(self.leaves, state, packed)
        options = compiler_options(self.leaves, self.mesh.devices.flat[0])
        return lowered.compile(compiler_options=options), state, packed

    def _input(self, case: DecodeCase, shape: StepShape) -> StepInput:
        """Page tables: full pages of the shared tokens are in every table, the rest is unique."""
        B, S = case.batch, self.page_size
        common = case.shared // S
        own = -(-case.context // S) - common
        ids = np.random.default_rng(0).permutation(common + B * own).astype(np.int32)
        table = np.zeros((B, shape.table_pages), np.int32)
        table[:, :common] = ids[:common]
        table[:, common : common + own] = ids[common:].reshape(B, own)
        cost_model = self.backend.tuning.cost_model
        modes: dict[str, Sharing] = {"on": "on", "off": "off", "auto": cost_model}
        context = np.full(B, case.context, np.int32)
        plan, _ = plan_attention(
            table,
            np.arange(B + 1, dtype=np.int32),
            context,
            page_size=S,
            shape=shape.plans[0],
            sharing=modes[self.relay],
        )
        last, every = context - 1, np.arange(B, dtype=np.int32)
        padding = (0, shape.rows - B)
        kv_slots = np.pad(table[every, last // S] * S + last % S, padding, constant_values=-1)
        return StepInput(
            tokens=np.zeros(shape.rows, np.int32),
            token_slot=np.pad(every, padding, constant_values=-1),
            positions=np.pad(last, padding, constant_values=-1),
            groups=(GroupInput((kv_slots,), (table,), None, plan),),
            sample_row=every,
            slots=every,
            live=np.ones(B, np.int32),
            table_pages=shape.table_pages,
            states=self._state_rows(shape) if self.config.linear is not None else None,
        )

    def _state_rows(self, shape: StepShape) -> StateRows:
        """Every row goes on from a state of its own; rows are at all places of their pages."""
        B, S = shape.seqs, self.page_size
        rows = empty_state_rows(
            rows=shape.rows, seqs=B, page_size=S, one_row_each=shape.one_row_each
        )
        every = np.arange(B, dtype=np.int32)
        table = np.stack([every, every + B], 1)
        start = S + every * max(1, S // B) % S
        write_state_rows(rows, table, page_size=S, slots=every, start=start, stop=start + 1)
        return rows

    def _state(self, rows: int, pages: int) -> StepState:
        config, V = self.config, self.config.vocab_size
        shape = (pages, config.num_kv_heads, self.page_size, config.head_dim)
        sharding = parameter_sharding("P K S H", shape, self.mesh)
        normal = functools.partial(jax.random.normal, shape=shape, dtype=self.dtype)
        draw = jax.jit(normal, out_shardings=sharding)
        L = sum(not config.is_linear(layer) for layer in range(config.num_layers))
        pools = [draw(key) for key in jax.random.split(jax.random.key(1), 2 * L)]
        tokens = jax.random.randint(jax.random.key(2), (rows,), 0, V, jnp.int32)
        whole = NamedSharding(self.mesh, PartitionSpec())
        sampling, tokens = jax.device_put((init_state(rows, V), tokens), whole)
        states = []
        if config.linear is not None:
            states = make_states(
                config,
                num_states=2 * rows,
                num_slots=rows,
                page_size=self.page_size,
                dtype=self.dtype,
                mesh=self.mesh,
            )
        return StepState(pools[:L], pools[L:], sampling, tokens, self.peers, states)

    def measure(self, row: Row, ceilings: Ceilings, profile: int = 0) -> dict[str, Any]:
        """Compile, run and time one row of the table; name its ``profile`` longest kernels."""
        case = row.case
        roofline = roofline_seconds(self.config, case, self.dtype, ceilings) / self.mesh.size
        start = time.perf_counter()
        compiled, state, packed = self.compiled(case)
        compile_s = time.perf_counter() - start
        box = [state]
        del state

        def run() -> Array:
            box[0], result = compiled(self.leaves, box[0], packed)
            return result.tokens if isinstance(result, StepResult) else result

        steps = self.num_decode_steps
        if jax.default_backend() == "gpu":
            repeats = max(2, min(40, round(0.02 / roofline / steps)))
            seconds, sustained = burst_seconds(run, repeats), seconds_per_call(run, 3 * repeats)
        else:  # which needs no rest
            seconds = sustained = seconds_per_call(run, repeats=2)
        seconds, sustained = seconds / steps, sustained / steps
        times, busy = kernel_times(run) if profile else ([], None)
        times = [each.of_one(steps) for each in times]
        self.peers = box[0].peers  # the steps donated what there was
        aimed = "H200" in self.mesh.devices.flat[0].device_kind  # which the targets are for
        return {
            "model": row.model,
            "layers": row.layers,
            "devices": None if self.mesh.size == 1 else self.mesh.size,
            "batch": case.batch,
            "shared": case.shared,
            "own": case.own,
            "relay": self.relay,
            "weights": self.quantization or self.dtype.name,
            "step_ms": 1e3 * seconds,
            "sustained_ms": 1e3 * sustained,
            "floor_ms": 1e3 * roofline,
            "ratio": seconds / roofline,
            "reach_ratio": row.target_ratio if aimed and self.quantization is None else None,
            "reach_ms": row.target(self.quantization) if aimed else None,
            "kernels": _kernels(compiled.as_text()),
            "compile_s": compile_s,
            "busy_ms": None if busy is None else 1e3 * busy / steps,
            "longest": [dataclasses.asdict(kernel) for kernel in times[:profile]],
            "temporary_bytes": int(compiled.memory_analysis().temp_size_in_bytes),
        }


def _kernels(hlo: str) -> int:
    """Number of operations in the optimised program that start on the device; loops count once."""
    inside = set(re.findall(r"calls=(%[\w.-]+)", hlo))
    count, counted = 0, True
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").split(" ", 1)[0]
            counted = name not in inside
        elif counted:
            count += bool(_STARTED.search(line))
    return count
