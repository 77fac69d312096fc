"""Reports the choices of kernels to users."""

import logging
from collections.abc import Iterable

from jax.typing import DTypeLike

from rjax.batch.kernel_use import KernelUse
from rjax.models import ModelConfig, place
from rjax.models.schemes import UNQUANTISED
from rjax.pallas_kernels.residual.peers import Peers
from rjax.worker.backend import Backend
from rjax.worker.kernels.dispatcher import Choice
from rjax.worker.recorded_operations import layer_choices

_log = logging.getLogger("rjax")


class KernelLog:
    """Names the kernels of each step size in the log, when its first program is traced."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._logged: set[int] = set()

    def __call__(self, choices: list[Choice]) -> None:
        """Log the choices of a step unless its size is logged already."""
        rows = choices[0].problem.rows
        if rows not in self._logged:
            self._logged.add(rows)
            uses = kernel_uses(rows, choices, self._backend)
            _log.info("a step of %d rows: %s", rows, "; ".join(map(str, uses)))


def kernel_uses(rows: int, choices: Iterable[Choice], backend: Backend) -> list[KernelUse]:
    """The distinct uses of kernels in a step of ``rows`` rows, attention first.

    An operation that no kernel does as a whole is there for the kernels that refused it, beside the
    operations that it consists of.
    """
    attention = f"{backend.name}.paged_attention"
    uses = [KernelUse(rows, "attention", "", attention, backend.refused)]
    for choice in choices:
        if choice.kernel is None and not choice.refused:
            continue  # the backend has no kernel of this operation
        problem, name = choice.problem, None if choice.kernel is None else choice.kernel.name
        uses.append(KernelUse(rows, problem.operation, problem.label, name, choice.refused))
    return list(dict.fromkeys(uses))


def step_kernels(
    rows: int,
    *,
    model: ModelConfig,
    dtype: DTypeLike,
    kv_dtype: DTypeLike,
    page_size: int,
    backend: Backend,
    devices: int,
    peers: Peers | None = None,
) -> list[KernelUse]:
    """The kernel of each operation in a step of ``rows`` rows; nothing is computed or compiled."""
    layers = reversed(range(model.num_layers))
    kinds = {(model.has_experts(i), model.is_linear(i)): i for i in layers}
    choices = [
        choice
        for first in sorted(kinds.values())
        for choice in layer_choices(
            backend.dispatcher,
            backend.attention,
            model,
            first,
            rows=rows,
            dtype=dtype,
            devices=devices,
            kv_dtype=kv_dtype,
            page_size=page_size,
            peers=peers,
        )
    ]
    return kernel_uses(rows, choices, backend)


def dequantised_projections(
    backend: Backend,
    model: ModelConfig,
    dtype: DTypeLike,
    *,
    devices: int,
    rows: Iterable[int],
) -> dict[str, dict[int, str | None]]:
    """Which quantised projections are dequantised before each product, in steps of which rows.

    Args:
        backend: chooses the kernels.
        model: its layers may be quantised differently.
        dtype: dtype of the activations.
        devices: number of devices that the projections are sharded over.
        rows: numbers of rows of the steps.

    Returns:
        For each quantised projection, such as "D -> K A H", and each number of rows: None where a
        kernel reads the weights as they are stored; else why the first kernel does not, "" if there
        is none.
    """
    rows = list(rows)
    found: dict[str, dict[int, str | None]] = {}
    for number in _different_layers(model):
        for count in rows:
            choices = layer_choices(
                backend.dispatcher,
                backend.attention,
                model,
                number,
                rows=count,
                dtype=dtype,
                devices=devices,
            )
            for choice in choices:
                problem, kernel = choice.problem, choice.kernel
                if kernel is None or not problem.schemes or UNQUANTISED in problem.schemes:
                    continue
                of_rows = found.setdefault(problem.label, dict.fromkeys(rows))
                if kernel.dequantises:
                    of_rows[count] = next((reason for _, reason in choice.refused), "")
    return found


def _different_layers(model: ModelConfig) -> list[int]:
    """The first layer of each way in which layers are quantised."""
    first = {}
    for number in range(model.num_layers):
        path = f"layers.{number}."
        schemes = (
            (name.removeprefix(path), scheme)
            for name, scheme in model.schemes
            if name.startswith(path)
        )
        first.setdefault(frozenset(schemes), number)
    return list(first.values())


_ROWS_OF_EXPERTS = 64  # their kernels take any number


def advise_whole_experts(
    backend: Backend, model: ModelConfig, dtype: DTypeLike, devices: int
) -> str | None:
    """What ``enable_expert_parallel`` would gain, or None.

    It gains something where experts that are cut over devices run without a kernel that whole ones
    would have.

    Args:
        backend: chooses the kernels.
        model: the model's configuration, placed on the devices.
        dtype: dtype of the activations.
        devices: number of devices on the mesh axis ``tensor``.
    """
    if devices == 1 or model.experts is None or model.experts.parallel:
        return None
    try:
        whole = place(model, devices, expert_parallel=True)
    except ValueError:
        return None
    cut, other = (_choice_of_experts(backend, each, dtype, devices) for each in (model, whole))
    if cut.kernel is None or other.kernel is None or not cut.kernel.dequantises:
        return None
    if other.kernel.dequantises:
        return None
    reasons = [reason for name, reason in cut.refused if name == other.kernel.name]
    return (
        f"experts that are cut over {devices} devices run as {cut.kernel.name} "
        f"({'; '.join(reasons)}); enable_expert_parallel keeps them whole, for {other.kernel.name}"
    )


def _choice_of_experts(
    backend: Backend, model: ModelConfig, dtype: DTypeLike, devices: int
) -> Choice:
    layer = next(i for i in range(model.num_layers) if model.has_experts(i))
    choices = layer_choices(
        backend.dispatcher,
        backend.attention,
        model,
        layer,
        rows=_ROWS_OF_EXPERTS,
        dtype=dtype,
        devices=devices,
    )
    return next(choice for choice in choices if choice.problem.operation == "experts")
