"""Rounded values do not depend on how XLA divides and converts."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Literal

from rjax.models.quantising.rounding import round_groups
from rjax.models.schemes import MXFP4, ON_LOAD, Scaled

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


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_are_of_the_stored_scales(dtype):
    weight, scheme = random_weight(dtype), Scaled("int4", (1, GROUP), scale_dtype=dtype)

    def leaves(weight):
        found = scheme.quantise(weight, (1, GROUP))
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
    found = Scaled("int4", (1, GROUP), scale_dtype="float16").quantise(weight, (1, GROUP))
    assert 0 < found["weight_scale"].min() < jnp.finfo("float16").smallest_normal
    assert abs(found["weight"].astype(jnp.int8)).max() == 7


@pytest.mark.parametrize("compiled", [False, True])
def test_halves_become_even(compiled):
    weight = random_weight("bfloat16")

    def leaves(weight):
        found = ON_LOAD["int4"].quantise(weight, (1, GROUP))
        return found["weight"].astype(jnp.int8), found["weight_scale"]

    values, scale = (jax.jit(leaves) if compiled else leaves)(weight)
    quotients = exact_quotients(weight, scale)
    assert (np.abs(quotients - np.trunc(quotients)) == 0.5).sum() > 100
    np.testing.assert_array_equal(values, np.clip(np.round(quotients), -7, 7))


def mxfp4_of(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The nearest float4_e2m1fn, as ml_dtypes rounds, times these scales; in float32."""
    groups = np.clip(weight.reshape(*scale.shape, 32) / scale[..., None], -6, 6)
    nearest = groups.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (nearest * scale[..., None]).reshape(weight.shape)


def mxfp4_leaves(weight) -> tuple[np.ndarray, np.ndarray]:
    """The bits of the values, 0 to 15, and the scales in float32."""
    found = jax.jit(lambda weight: MXFP4.quantise(weight, (1, 32)))(jnp.asarray(weight))
    bits = np.asarray(found["weight"]).astype(np.int8) & 15
    return bits, np.asarray(found["weight_scale"]).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def mxfp4_meaning(weight) -> np.ndarray:
    leaves = MXFP4.quantise(jnp.asarray(weight), (1, 32))
    return np.asarray(MXFP4.widened(leaves))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("deviation", [1e-30, 0.02, 1.0])
def test_values_of_mxfp4_are_the_nearest_of_their_scales(dtype, deviation):
    weight = np.asarray(random_weight(dtype, deviation=deviation))
    bits, scale = mxfp4_leaves(weight)
    groups = weight.reshape(*scale.shape, 32) / scale[..., None]
    largest = np.abs(groups).max(-1)
    assert ((largest >= 3.5) & (largest < 7)).all()
    nearest = np.clip(groups, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(bits, nearest.view(np.uint8).reshape(weight.shape))
    np.testing.assert_array_equal(mxfp4_meaning(weight), mxfp4_of(weight, scale))


@pytest.mark.thorough
def test_halves_of_mxfp4_become_even():
    halves = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    group = np.concatenate([halves, -halves, np.zeros(16)]).astype(np.float32)
    even = np.array([0, 1, 1, 2, 2, 4, 4, 6])
    wanted = np.concatenate([even, -even, np.zeros(16)])
    np.testing.assert_array_equal(mxfp4_meaning(group[None])[0], wanted)


@pytest.mark.thorough
def test_every_number_of_mxfp4_stays_as_it_is():
    draw = np.random.default_rng(0)
    values = draw.integers(0, 16, (512, 4, 32), np.uint8).view(ml_dtypes.float4_e2m1fn)
    scale = 2.0 ** draw.integers(-100, 2, (512, 4, 1))
    weight = (values.astype(np.float32) * scale).astype(np.float32).reshape(512, -1)
    np.testing.assert_array_equal(mxfp4_meaning(weight), weight)


@pytest.mark.thorough
def test_the_ends_of_the_range_of_mxfp4():
    weight = np.zeros((4, 32), np.float32)
    weight[1, :2], weight[2, :3], weight[3, 0] = (12, 1), (1e6, -40, 3), 2.0**-130
    found = mxfp4_meaning(weight)
    assert not found[0].any() and not found[3].any()
    assert found[1, :2].tolist() == [12, 1] and found[2, :3].tolist() == [12, -12, 3]
