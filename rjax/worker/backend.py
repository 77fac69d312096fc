"""The kernels of an engine: its attention backend, and the dispatcher of all other operations."""

import dataclasses
import logging
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from rjax.errors import InvalidConfigError
from rjax.models import ModelConfig
from rjax.pallas_kernels.attention.backend import AttentionBackend, AttentionShape, AttentionTuning
from rjax.pallas_kernels.attention.plan.host import PlanShape, choose_kv_split_size
from rjax.pallas_kernels.attention.registry import BACKENDS
from rjax.pallas_kernels.gemm.base import LinearProblem
from rjax.pallas_kernels.gemm.skinny_gemm import ROWS
from rjax.pallas_kernels.kernel import DeviceInfo, Problem
from rjax.worker.kernels import Dispatcher
from rjax.worker.recorded_operations import layer_choices

_log = logging.getLogger("rjax")


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """The kernels of one model on one kind of device.

    Attributes:
        attention: the attention kernels.
        tuning: the attention's tuning for the heads of one device.
        tunings: (window, the same for the layers with it) where layers differ in their heads.
        dispatcher: chooses the other kernels.
        streamed_rows: numbers of rows at which kernels that stream weights take every projection.
        refused: (name, reason) of the faster attention backends that cannot run this.
    """

    attention: AttentionBackend
    tuning: AttentionTuning
    dispatcher: Dispatcher
    streamed_rows: tuple[int, ...]
    refused: tuple[tuple[str, str], ...] = ()
    tunings: tuple[tuple[int | None, AttentionTuning], ...] = ()

    @property
    def name(self) -> str:
        """Name of the attention backend, as the configuration spells it."""
        return self.attention.name

    def padded_rows(self, rows: int) -> int:
        """Rows that a decode step of ``rows`` sequences is padded to."""
        return next((count for count in self.streamed_rows if rows <= count), rows)

    @property
    def spare_rows(self) -> int:
        """Rows up to which a step is bound by reading the weights; 0 if that is not known."""
        return max(self.streamed_rows, default=0)

    def plan_shape(
        self,
        rows: int,
        seqs: int,
        max_context: int,
        page_size: int,
        *,
        coalesce: bool,
        unpadded_rows: int | None = None,
        kv_split_size: int | None = None,
        window: int | None = None,
    ) -> PlanShape:
        """Shapes of the attention plan of a step.

        Args:
            rows: tokens of the step, padding included.
            seqs: sequences of the step.
            max_context: tokens of the longest sequence.
            page_size: tokens a page.
            coalesce: whether KV splits may be coalesced; results are then equal within rounding
                whoever shares a prefix, without it in every bit.
            unpadded_rows: tokens of the step at most, by default ``rows``.
            kv_split_size: tokens of a KV split; by default the backend's tuning.
            window: sliding window of the layers that the plan serves, in tokens; None without.
        """
        tuning = dict(self.tunings).get(window, self.tuning)
        policy = tuning.split_policy if coalesce else None
        fine = (unpadded_rows or rows) <= tuning.fine_rows
        tuned = tuning.fine_kv_split_size if fine else tuning.kv_split_size
        smallest = kv_split_size or max(tuned, page_size)
        longest = max_context if window is None else min(max_context, window + smallest)
        split = choose_kv_split_size(longest, smallest, policy)
        tile_rows = min(tuning.tile_rows, rows)  # kernels for few rows have less code
        return PlanShape(rows, seqs, max_context, tile_rows, split, policy, window)


def choose_backend(
    name: str,
    *,
    platform: str,
    compute_capability: float | None,
    model: ModelConfig,
    dtype: DTypeLike,
    page_size: int,
    kv_dtype: DTypeLike | None = None,
    devices: int = 1,
) -> Backend:
    """The kernels for a model, each chosen on its own.

    Args:
        name: "mosaic", "triton" or "xla" for attention by that backend and no other kernels but its
            own and plain JAX. With "auto" attention is by the first backend that can run this, the
            log says why the ones before it cannot, and the other kernels are all that the device
            can run.
        platform: platform of the devices, "cpu" or "gpu".
        compute_capability: compute capability of a GPU, such as 9.0 for Hopper; None for other
            devices.
        model: its shapes decide which kernels can run.
        dtype: dtype of the weights.
        page_size: tokens a page.
        kv_dtype: dtype of the KV: float8_e4m3fn, or None for ``dtype``.
        devices: number of devices that share the heads and the projections.

    Raises:
        InvalidConfigError: an unknown name, or a backend that cannot run this, and why.
    """
    names = [backend.name for backend in BACKENDS]
    if name not in ("auto", *names):
        raise InvalidConfigError(
            f"backend is {name!r}; choose one of {', '.join(('auto', *names))}"
        )
    device = DeviceInfo(platform, compute_capability)

    def of_heads(num_kv_heads: int, head_dim: int) -> AttentionShape:
        return AttentionShape(
            num_heads=model.num_heads // devices,
            num_kv_heads=num_kv_heads // devices,
            head_dim=head_dim,
            dtype=jnp.dtype(dtype),
            page_size=page_size,
            kv_dtype=None if kv_dtype is None else jnp.dtype(kv_dtype),
        )

    heads = {model.sliding_windows[i]: of_heads(*each) for i, each in enumerate(model.layer_heads)}
    shapes = tuple(dict.fromkeys(heads.values()))
    candidates = [backend for backend in BACKENDS if name in ("auto", backend.name)]
    reasons = [
        (backend, next(filter(None, (backend.refusal(shape, device) for shape in shapes)), None))
        for backend in candidates
    ]
    attention = next((backend for backend, reason in reasons if reason is None), None)
    if attention is None:
        raise InvalidConfigError(f"the {name} backend cannot run this: {reasons[0][1]}; use auto")
    before = reasons[: candidates.index(attention)]
    refused = [(backend.name, reason) for backend, reason in before if reason is not None]
    if refused and platform == "gpu":
        slow = attention is BACKENDS[-1]
        _log.log(
            logging.WARNING if slow else logging.INFO,
            "attention by the %s%s backend: %s",
            "slower " if slow else "",
            attention.name,
            "; ".join(f"{other} cannot: {reason}" for other, reason in refused),
        )
    dispatcher = Dispatcher.of(name, device)
    return Backend(
        attention=attention,
        tuning=attention.tuning(of_heads(model.num_kv_heads, model.head_dim)),
        dispatcher=dispatcher,
        streamed_rows=streamed_rows(dispatcher, attention, model, dtype, devices),
        refused=tuple(refused),
        tunings=tuple((window, attention.tuning(each)) for window, each in heads.items())
        if len(shapes) > 1
        else (),
    )


def streamed_rows(
    dispatcher: Dispatcher,
    attention: AttentionBackend,
    model: ModelConfig,
    dtype: DTypeLike,
    devices: int,
) -> tuple[int, ...]:
    """Rows at which kernels that stream weights take every projection of a layer, ascending.

    The layer is one with or without experts, whichever most layers are: DeepSeek's first dense
    layer has a width that not all kernels take. One row counts where the norms and the merge of
    attention are part of the products too.
    """
    kinds: dict[bool, list[int]] = {}
    for i in range(model.num_layers):
        kinds.setdefault(model.has_experts(i), []).append(i)
    usual = [of_kind[0] for of_kind in kinds.values() if 2 * len(of_kind) >= model.num_layers]

    def streams(rows: int) -> bool:
        choices = [
            choice
            for i in usual
            for choice in layer_choices(
                dispatcher, attention, model, i, rows=rows, dtype=dtype, devices=devices
            )
            if choice.problem.schemes
        ]
        fused = [choice for choice in choices if choice.kernel is None]
        apart = rows == 1 and any(_could_join(choice.problem) for choice in fused)
        kernels = [choice.kernel for choice in choices if choice.kernel is not None]
        return not apart and all(kernel.pads_rows for kernel in kernels)

    return tuple(rows for rows in ROWS if streams(rows))


def _could_join(problem: Problem) -> bool:
    """Whether there are kernels of one row for it: of a product and of what comes before it."""
    if problem.operation == "norm_linear_activation":
        assert isinstance(problem, LinearProblem) and problem.activation is not None
        return problem.activation.is_swiglu
    return problem.operation in ("norm_linear", "merge_linear")


def compute_capability(device: Any) -> float | None:
    """The compute capability of an NVIDIA GPU, such as 9.0; None for other devices."""
    found = getattr(device, "compute_capability", None)
    return None if found is None else float(found)
