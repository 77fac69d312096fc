"""The names that the option ``quantization`` takes: what is registered in `rjax.models`."""

import difflib

from rjax.errors import InvalidConfigError


def check_quantization(name: str | None) -> None:
    """Check that a scheme for loading or a format of checkpoints has this name. Imports JAX.

    Raises:
        InvalidConfigError: nothing registered has it; the message lists the names that are.
    """
    if name is None:
        return
    from rjax.models.loading.config import quantization_names

    if name in (known := quantization_names()):
        return
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise InvalidConfigError(f"quantization is {name!r}; choose one of {', '.join(known)}{hint}")
