"""Test set-up: every annotation of the packages is checked at run time, in tests only."""

import jaxtyping

# Before any import of the packages. PEP 484's tower lets a whole number stand for a float.
jaxtyping.install_import_hook(
    ["pallas_kernels", "models", "rjax"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)
