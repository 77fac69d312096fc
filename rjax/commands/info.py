"""The command ``rjax info``: versions, devices, and which kernels run and why."""

import argparse
import importlib.metadata
import json
import platform as python_platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import rjax
from rjax.cli.arguments import add_engine_arguments, add_model_argument, given_engine_options
from rjax.cli.errors import parse_and_run
from rjax.cli.parser import OneLineParser
from rjax.vllm.options import instead_of

if TYPE_CHECKING:
    from rjax.worker.engine_plan import EnginePlan

_NAME = "rjax info"
_PACKAGES = (
    *("jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "safetensors"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    *("jax-triton", "llguidance", "fastapi", "uvicorn"),
)
_EPILOG = """\
examples:
  rjax info
      this machine, and the kernels of the bundled model on it
  rjax info ./llama --tensor-parallel-size 2
      the kernels of another model; takes the options of 'rjax serve' and reads config.json only
  rjax info --json
      for a bug report

exit status: 0 done, 2 bad input
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = OneLineParser(
        prog=_NAME,
        usage="%(prog)s [MODEL] [options]",
        description="Show versions, devices, and which kernels run and why.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        instead=instead_of,
    )
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_engine_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return parse_and_run(_NAME, build_parser(), argv, _show)


def _show(arguments: argparse.Namespace) -> int:
    from rjax.config import EngineConfig

    config = EngineConfig.from_options(given_engine_options(arguments))
    found = {"versions": versions(), "devices": devices(), **kernels(config)}
    print(json.dumps(found) if arguments.json else "\n".join(_lines(found)))
    return 0


def versions() -> dict[str, str | None]:
    """Versions by package; None for one that is not installed."""
    found: dict[str, str | None] = {
        "rjax": rjax.__version__,
        "python": python_platform.python_version(),
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def devices() -> list[dict[str, Any]]:
    """What JAX runs on."""
    import jax

    from rjax.worker.backend import compute_capability

    return [
        {
            "kind": device.device_kind,
            "platform": device.platform,
            "compute_capability": compute_capability(device),
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            "driver": getattr(device.client, "platform_version", "").split("\n")[0],
        }
        for device in jax.devices()
    ]


def kernels(config: Any) -> dict[str, Any]:
    """The attention backends and the kernels of a model's steps, each with the reason.

    Only config.json of the model is read.

    Args:
        config: `rjax.config.EngineConfig`.
    """
    from rjax.build.plan_engine import choose_platform, choose_weights, plan_engine
    from rjax.build.summary import dtype_names, model_input, model_name
    from rjax.config.quantization_names import check_quantization
    from rjax.models import BUNDLED_MODEL, config_from_folder, resolve_folder
    from rjax.pallas_kernels.attention.registry import BACKENDS

    settings = config.model
    check_quantization(settings.quantization)
    folder = resolve_folder(
        settings.model or BUNDLED_MODEL, settings.revision, settings.hf_token, weights=False
    )
    model = choose_weights(config, config_from_folder(folder, settings.quantization))
    length = settings.max_model_len or model.default_length
    plan = plan_engine(choose_platform(config, model, length))
    refused = dict(plan.backend.refused)
    backends = {
        name: refused.get(name) or ("in use" if name == plan.backend.name else "not needed")
        for name in (backend.name for backend in BACKENDS)
    }
    return {
        "model": model_name(config, plan.model),
        "input": model_input(plan.model),
        "dtype": dtype_names(plan),
        "runs_on": plan.description,
        "weight_bytes_per_device": plan.weight_bytes,
        "backends": backends,
        "kernels": _step_kernels(plan),
    }


def _step_kernels(plan: "EnginePlan") -> list[dict[str, Any]]:
    """The kernels of a step of one sequence, of all sequences, and of prompt chunks."""
    from rjax.worker.kernels.uses import step_kernels

    backend, limits = plan.backend, plan.limits
    found = []
    for rows in (1, backend.padded_rows(limits.max_num_seqs), limits.max_num_batched_tokens):
        uses = step_kernels(
            rows,
            model=plan.model,
            dtype=plan.dtype,
            kv_dtype=plan.kv_dtype,
            page_size=plan.config.cache.page_size,
            backend=backend,
            devices=plan.mesh.size,
        )
        found += [
            {
                "rows": use.rows,
                "operation": f"{use.operation} {use.label}".rstrip(),
                "kernel": use.kernel,
                "refused": dict(use.refused),
            }
            for use in uses
        ]
    return found


def _lines(found: dict[str, Any]) -> list[str]:
    facts = [(name, version or "not installed") for name, version in found["versions"].items()]
    for number, device in enumerate(found["devices"]):
        capability, memory = device["compute_capability"], device["memory_bytes"]
        notes = [
            device["kind"],
            *([f"compute capability {capability}"] if capability else []),
            *([f"{memory / 2**30:.1f} GiB for JAX"] if memory else []),
            *([device["driver"]] if device["driver"] else []),
        ]
        facts.append((f"device {number}", ", ".join(notes)))
    weights = f"{found['weight_bytes_per_device'] / 2**30:.2f} GiB on each device"
    facts += [("model", found["model"]), ("input", found["input"])]
    facts += [("weights", weights), ("dtype", found["dtype"])]
    facts.append(("runs on", found["runs_on"]))
    facts += [(f"backend {name}", why) for name, why in found["backends"].items()]
    width = max(len(name) for name, _ in facts)
    lines = [f"{name:{width}}  {value}" for name, value in facts]
    return [*lines, "", *_kernel_lines(found["kernels"])]


def _kernel_lines(uses: list[dict[str, Any]]) -> list[str]:
    """A table of operations with a column for each step size, and the reasons of refusals."""
    from rjax.batch.kernel_use import SEPARATE

    sizes = list(dict.fromkeys(use["rows"] for use in uses))
    operations = list(dict.fromkeys(use["operation"] for use in uses))
    kernel = {(use["operation"], use["rows"]): use["kernel"] or SEPARATE for use in uses}
    table = [["operation", *(f"{size:,} rows a step" for size in sizes)]]
    table += [[name, *(kernel.get((name, size), "-") for size in sizes)] for name in operations]
    widths = [max(len(row[i]) for row in table) for i in range(len(sizes) + 1)]
    lines = [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    reasons = dict.fromkeys(
        f"{name} does not take {use['operation']} of {use['rows']:,} rows: {reason}"
        for use in uses
        for name, reason in use["refused"].items()
        if use["operation"] != "attention"  # those of the backends
    )
    return [*lines, *(["", *reasons] if reasons else [])]
