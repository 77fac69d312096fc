"""A quantised weight, and how compressed-tensors stores it."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """weight = (value - zero point) * scale.

    Attributes:
        values: [outputs, inputs], float8_e4m3fn or int8.
        scale: [outputs, groups], one group for channels.
        zero_point: int8 [outputs, groups]; None for none.
        packed: the values fit into 4 bits and are stored so.
    """

    values: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None = None
    packed: bool = False

    def dequantised(self) -> np.ndarray:
        """The weight, float32."""
        outputs, groups = self.scale.shape
        values = self.values.astype(np.float32).reshape(outputs, groups, -1)
        if self.zero_point is not None:
            values = values - self.zero_point[:, :, None]
        return (values * self.scale.astype(np.float32)[:, :, None]).reshape(outputs, -1)

    def tensors(self, module: str) -> dict[str, np.ndarray]:
        """The tensors of the module in the checkpoint."""
        if not self.packed:
            named = {"weight": self.values, "weight_scale": self.scale}
        else:
            named = {
                "weight_packed": pack_int4(self.values, 1),
                "weight_scale": self.scale,
                "weight_shape": np.array(self.values.shape, np.int64),
            }
            if self.zero_point is not None:
                named["weight_zero_point"] = pack_int4(self.zero_point, 0)
        return {f"{module}.{name}": np.ascontiguousarray(one) for name, one in named.items()}


def pack_int4(values: np.ndarray, axis: int) -> np.ndarray:
    """Integers in -8..7 as words of eight along an axis, plus 8 and the first in the lowest bits.

    Args:
        values: int8 [R, C].
        axis: 0 or 1; the last word is filled up with zeros.
    """
    unsigned = np.moveaxis(values.astype(np.int16) + 8, axis, 1).astype(np.uint32)
    unsigned = np.pad(unsigned, ((0, 0), (0, -unsigned.shape[1] % 8)))
    words = np.zeros((unsigned.shape[0], unsigned.shape[1] // 8), np.uint32)
    for place in range(8):
        words |= unsigned[:, place::8] << np.uint32(4 * place)
    return np.ascontiguousarray(np.moveaxis(words.view(np.int32), 1, axis))
