"""Seeds of the samples of a request."""

import numpy as np


def sequence_seed(seed: int, index: int) -> int:
    """The seed, 0 to 2**64-1, of sample ``index`` of a request.

    The first sample uses the request's seed, modulo 2**64, so that it does not depend on ``n``. The
    others use NumPy's ``SeedSequence``, whose output is the same on every version and platform.
    """
    seed %= 2**64
    if index == 0:
        return seed
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0])


def drawn_seed(engine_seed: int, arrival: int) -> int:
    """The seed of a request without one, from the engine's and the number of the request."""
    drawn = np.random.SeedSequence([engine_seed, arrival])
    return int(drawn.generate_state(1, np.uint64)[0])
