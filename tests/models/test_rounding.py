"""Rounded values do not depend on how XLA divides and converts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Literal

from rjax.models.formats import ON_LOAD
from rjax.models.quantising.rounding import round_groups
from rjax.models.schemes import Scaled
from rjax.models.schemes.rounding import quantise

GROUP = 128


def random_weight(dtype, shape=(256, 4 * GROUP), deviation=0.02) -> jax.Array:
    values = deviation * np.random.default_rng(0).standard_normal(shape, np.float32)
    return jnp.asarray(values, dtype).astype(jnp.float32)


def exact_quotients(weight: jax.Array, scale: jax.Array) -> np.ndarray:
    """In float64, whose halves are halves."""
    weight, scale = (np.asarray(each.astype(jnp.float32), np.float64) for each in (weight, scale))
    quotients = weight.reshape(*scale.shape, -1) / scale[..., None]
    return quotients.reshape(weight.shape)


def without_rounding(traced: ClosedJaxpr, *arguments: jax.Array) -> list[jax.Array]:
    """The results if no conversion between floats rounds, as may be on GPUs."""
    jaxpr, consts = traced.jaxpr, traced.consts
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    for step in jaxpr.eqns:
        given = [each.val if isinstance(each, Literal) else known[each] for each in step.invars]
        types = [each.aval.dtype for each in (*step.invars, *step.outvars)]
        if "jaxpr" in step.params:
            results = without_rounding(step.params["jaxpr"], *given)
        elif step.primitive.name == "convert_element_type" and all(
            jnp.issubdtype(dtype, jnp.floating) for dtype in types
        ):
            results = given
        else:
            results = [step.primitive.bind(*given, **step.params)]
        known |= dict(zip(step.outvars, results, strict=True))
    return [known[each] for each in jaxpr.outvars]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_are_of_the_stored_scales(dtype):
    weight, scheme = random_weight(dtype), Scaled("int4", (1, GROUP), scale_dtype=dtype)

    def leaves(weight):
        found = quantise(weight, scheme, (1, GROUP))
        return found["weight"].astype(jnp.int8), found["weight_scale"]

    def groups(weight):
        return round_groups(weight, GROUP, True, dtype)[:2]

    for compute in (leaves, groups):
        values, scale = compute(weight)
        same_values, wide = without_rounding(jax.make_jaxpr(compute)(weight), weight)
        np.testing.assert_array_equal(wide.astype(dtype), scale.astype(dtype))
        np.testing.assert_array_equal(same_values, values)


def test_small_scales_of_float16_do_not_vanish():
    weight = random_weight("float32", deviation=1e-5)
    found = quantise(weight, Scaled("int4", (1, GROUP), scale_dtype="float16"), (1, GROUP))
    assert 0 < found["weight_scale"].min() < jnp.finfo("float16").smallest_normal
    assert abs(found["weight"].astype(jnp.int8)).max() == 7


@pytest.mark.parametrize("compiled", [False, True])
def test_halves_become_even(compiled):
    weight = random_weight("bfloat16")

    def leaves(weight):
        found = quantise(weight, ON_LOAD["int4"], (1, GROUP))
        return found["weight"].astype(jnp.int8), found["weight_scale"]

    values, scale = (jax.jit(leaves) if compiled else leaves)(weight)
    quotients = exact_quotients(weight, scale)
    assert (np.abs(quotients - np.trunc(quotients)) == 0.5).sum() > 100
    np.testing.assert_array_equal(values, np.clip(np.round(quotients), -7, 7))
