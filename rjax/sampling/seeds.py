"""Seeds of single sequences."""

import numpy as np


def sequence_seed(seed: int, index: int) -> int:
    """The seed, 0 to 2**64-1, of sample ``index`` of a request with this seed.

    The first sample has the request's own seed, so that it does not depend on ``n``; the others are
    drawn from NumPy's ``SeedSequence``, whose output is the same on every version and platform.
    """
    if index == 0:
        return seed
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0])
