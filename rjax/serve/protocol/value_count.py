"""Bound the values of JSON text before it is parsed."""

import numpy as np


def at_most_values(data: bytes, most: int) -> bool:
    """Whether JSON text holds at most ``most`` values, not counting keys.

    Each value but the first follows a comma or an opening bracket. These characters inside strings
    are excluded only if the total exceeds the limit. For invalid JSON the result is arbitrary.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") < most:
        return True
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # remaining quotes delimit strings
    text = np.frombuffer(plain, np.uint8)
    inside = np.bitwise_xor.accumulate((text == ord('"')).view(np.uint8)).view(bool)
    before = (text == ord(",")) | (text == ord("[")) | (text == ord("{"))
    return int(np.count_nonzero(before & ~inside)) < most
