"""A model's identity covers every bit of its weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rjax.models import BUNDLED_MODEL, config_from_folder
from rjax.worker.fingerprint import model_fingerprint
from tests.properties import num_examples

CONFIG = config_from_folder(BUNDLED_MODEL)
DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "int8", "uint8", "int4")


def weights(dtype: str = "bfloat16", seed: int = 0) -> list[jax.Array]:
    drawn = np.random.default_rng(seed).integers(-7, 8, (3, 5, 4))
    return [jnp.asarray(part).astype(dtype) for part in (drawn[:2], drawn[2], drawn[2, 0])]


def identity(leaves: list[jax.Array]) -> str:
    return model_fingerprint(CONFIG, leaves)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_weights_have_one_identity(dtype):
    assert identity(weights(dtype)) == identity(weights(dtype))
    assert len({identity(weights(dtype, seed)) for seed in range(20)}) == 20


@given(
    dtype=st.sampled_from(DTYPES),
    leaf=st.integers(0, 2),
    at=st.integers(0, 99),
    value=st.integers(0, 6),
)
@settings(max_examples=num_examples(60), deadline=None)
def test_one_other_value_is_another_model(dtype, leaf, at, value):
    ours = weights(dtype)
    flat = np.array(ours[leaf].astype("float32")).ravel()
    at %= flat.size
    flat[at] = value if flat[at] != value else value + 1
    theirs = list(ours)
    theirs[leaf] = jnp.asarray(flat).reshape(ours[leaf].shape).astype(dtype)
    assert identity(theirs) != identity(ours)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_values_counts(dtype):
    ours = weights(dtype)
    assert identity([ours[0][::-1], *ours[1:]]) != identity(ours)
    assert identity([ours[0].reshape(5, 2, 4), *ours[1:]]) != identity(ours)
    assert identity([ours[2], ours[1], ours[0]]) != identity(ours)


def test_the_sign_of_zero_and_the_dtype_count():
    zeros = jnp.zeros((2, 3))
    assert len({identity([zeros]), identity([-zeros]), identity([zeros.astype("int8")])}) == 3
