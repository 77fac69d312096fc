"""The rows of `bench.decode_step`."""

import dataclasses

from bench.decode_step.roofline import DecodeCase


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A row of the table with its target on an H200, over the roofline or in milliseconds.

    ``targets`` are those of quantised weights, in milliseconds. ``layers`` replaces the number of
    layers of the model's shapes.
    """

    model: str
    case: DecodeCase
    target_ratio: float | None = None
    target_ms: float | None = None
    targets: tuple[tuple[str, float], ...] = ()
    layers: int | None = None

    def target(self, quantization: str | None) -> float | None:
        """Milliseconds, of weights as they are stored."""
        return self.target_ms if quantization is None else dict(self.targets).get(quantization)


TABLE = (
    Row("llama-3-8b", DecodeCase(64, 2048, 256), 1.11, targets=(("fp8", 3.2), ("int4", 3.3))),
    Row("llama-3-8b", DecodeCase(1, 0, 1024), 1.06, targets=(("fp8", 2.3), ("int4", 1.7))),
    Row("llama-3-8b", DecodeCase(64, 0, 1024), 1.20),
    Row("llama-3-8b", DecodeCase(256, 8192, 256), 1.35, targets=(("fp8", 8.0), ("int4", 10.6))),
    Row("qwen2.5-3b", DecodeCase(64, 1656, 128), 1.21),
    Row("qwen2.5-3b", DecodeCase(1, 0, 1024)),
    Row("qwen2.5-0.5b", DecodeCase(16, 512, 128), None, 0.55),
    Row("qwen2.5-0.5b", DecodeCase(1, 0, 1024)),
    Row("qwen2.5-0.5b", DecodeCase(64, 2048, 128)),
    Row("qwen3-0.6b", DecodeCase(1, 0, 1024), 1.4),
    Row("qwen3-0.6b", DecodeCase(64, 2048, 128), 1.8),
)
FEW_ROWS = (
    Row("llama-3-8b", DecodeCase(8, 2048, 256)),
    Row("qwen2.5-3b", DecodeCase(16, 1656, 128)),
    Row("qwen2.5-0.5b", DecodeCase(16, 512, 128), None, 0.55),
    Row("qwen3-0.6b", DecodeCase(16, 2048, 128)),
)
EXPERTS = (
    Row("qwen3-30b-a3b", DecodeCase(1, 0, 1024), None, 2.1),
    Row("qwen3-30b-a3b", DecodeCase(16, 2048, 256), None, 11.0),
    Row("qwen3-30b-a3b", DecodeCase(64, 2048, 256), None, 16.0, targets=(("fp8", 8.5),)),
    Row("qwen3.5-35b-a3b", DecodeCase(1, 0, 1024)),
    Row("qwen3.5-35b-a3b", DecodeCase(64, 2048, 256)),
    Row("qwen3.5-35b-a3b", DecodeCase(64, 32768, 256)),
    Row("gpt-oss-20b", DecodeCase(1, 0, 1024), targets=(("mxfp4", 2.6),)),
    Row("gpt-oss-20b", DecodeCase(64, 2048, 256), targets=(("mxfp4", 5.0),)),
)
GROWTH = tuple(
    Row("llama-3-8b", DecodeCase(64, shared, 256)) for shared in (0, 2048, 8192, 16384, 32768)
)
_LLAMA_8B = (DecodeCase(1, 0, 1024), DecodeCase(64, 2048, 256), DecodeCase(256, 8192, 256))
_LLAMA_70B = (DecodeCase(1, 0, 1024), DecodeCase(64, 2048, 256))
_TARGETS_8B = {2: (2.5, 3.2, 6.4), 4: (1.7, 2.4, None), 8: (1.3, 2.1, None)}
_TARGETS_70B = {2: (4.7, 5.3), 4: (None, 12.0), 8: (None, 8.5)}  # on two GPUs of 20 layers
_FP8_TARGETS_70B = {4: 7.5, 8: 5.5}


def tensor_parallel(devices: int) -> tuple[Row, ...]:
    """The rows for several GPUs; targets are those of 2, 4 and 8 H200, other numbers have none.

    On fewer than four, 20 of the 80 layers of Llama-3-70B have to do.
    """
    targets = _TARGETS_8B.get(devices, (None,) * len(_LLAMA_8B))
    rows = [
        Row("llama-3-8b", case, target_ms=target)
        for case, target in zip(_LLAMA_8B, targets, strict=True)
    ]
    targets = _TARGETS_70B.get(devices, (None,) * len(_LLAMA_70B))
    layers = 20 if devices < 4 else None
    for case, target in zip(_LLAMA_70B, targets, strict=True):
        fp8 = _FP8_TARGETS_70B.get(devices) if case.batch > 1 else None
        rows.append(
            Row(
                "llama-3-70b",
                case,
                target_ms=target,
                targets=() if fp8 is None else (("fp8", fp8),),
                layers=layers,
            )
        )
    return tuple(rows)
