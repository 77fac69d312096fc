"""What the compiler made of a step: it copies neither weights nor KV."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rjax import functional
from rjax.batch.page_groups import one_group
from rjax.models.sharding import single_device_mesh
from rjax.pallas_kernels.attention.plan.host import PlanShape
from rjax.sampling import init_state
from rjax.worker.backend import choose_backend
from rjax.worker.pages.pools import make_pools
from rjax.worker.programs.keys import multi_step_key
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.layout import PackedLayout
from rjax.worker.step.program import compile_step
from rjax.worker.step.shape import StepShape
from rjax.worker.step.state import StepState
from tests.engine.tiny import make_engine, write_config
from tests.functional import families
from tests.functional.programs import CONFIG, prepared, prompts, tiny_model

_OPERATION = re.compile(r"= (\w+)\[([\d,]*)\]\S* (copy|transpose)\(")
GROUPS = one_group(CONFIG.num_layers)
PAGES = 53  # a number that no other array of these programs has as an axis


def moved(text: str) -> list[tuple[int, ...]]:
    """Shapes that a compiled program copies or transposes, axes of length 1 left out."""
    return [
        tuple(sorted(int(x) for x in dims.split(",") if x and int(x) > 1))
        for _, dims, _ in _OPERATION.findall(text)
    ]


def loops(text: str) -> str:
    """The program without its entry computation: bodies of loops and of fusions."""
    return re.sub(r"^ENTRY .*?^}", "", text, flags=re.DOTALL | re.MULTILINE)


def aliased(text: str) -> int:
    """Number of inputs whose memory an output takes."""
    return len(re.findall(r"(?:may|must)-alias\)", text.split("entry_computation_layout")[0]))


def compiled_text(step, weights, state, last) -> str:
    """The optimised program of ``step(weights, state, last)`` with its state donated.

    The state goes in flat: the type checks of a test run take no placeholders in its place.
    """
    leaves, treedef = jax.tree.flatten(state)

    def flat(weights, leaves, last):
        return jax.tree.leaves(step(weights, jax.tree.unflatten(treedef, leaves), last))

    return jax.jit(flat, donate_argnums=1).lower(weights, leaves, last).compile().as_text()


def forbidden(weights) -> set[tuple[int, ...]]:
    """Shapes of matrices and pools; vectors may be copied where the compiler likes."""
    shapes = {tuple(sorted(x.shape)) for x in jax.tree.leaves(weights) if x.ndim > 1}
    return shapes | {tuple(sorted((PAGES, CONFIG.num_kv_heads, 8, CONFIG.head_dim)))}


def test_the_check_sees_a_copy():
    wide = jnp.zeros((PAGES, 2, 8, 8))
    text = jax.jit(lambda x: x.at[3].set(1.0)).lower(wide).compile().as_text()
    assert tuple(sorted(wide.shape)) in moved(text)
    assert not aliased(text)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("rows", "seqs"), [(6, 6), (48, 6)], ids=["decode", "prompts"])
def test_the_engine_s_step_copies_neither_weights_nor_pages(rows, seqs):
    graph, weights = nnx.split(tiny_model())
    leaves, treedef = jax.tree.flatten(weights)
    mesh = single_device_mesh()
    backend = choose_backend(
        "xla",
        platform="cpu",
        compute_capability=None,
        model=CONFIG,
        dtype=jnp.float32,
        page_size=8,
    )
    plan = PlanShape(rows, seqs, 64, backend.tuning.tile_rows, 16)
    layout = PackedLayout(StepShape(rows, seqs, 8, 8, GROUPS, (plan,)))
    step = compile_step(graph, treedef, layout, StepFeatures("greedy"), backend, mesh)
    pools = make_pools(CONFIG, GROUPS, PAGES, 8, jnp.dtype(jnp.float32), mesh)
    sampling = init_state(seqs, CONFIG.vocab_size)
    state = StepState(*pools, sampling, jnp.zeros(seqs, jnp.int32))
    packed = jnp.zeros(layout.size, jnp.int32)
    text = compiled_text(step, leaves, state, packed)
    assert not set(moved(text)) & forbidden(weights)
    assert aliased(text) >= 2 * CONFIG.num_layers + 1  # the pools and what was sampled last


@pytest.mark.thorough
def test_a_decode_of_a_program_copies_neither_weights_nor_pages():
    setup, weights = prepared()
    state = functional.make_state(setup, batch=12, num_pages=PAGES, dtype=jnp.float32)
    step = functools.partial(functional.decode, setup)
    text = compiled_text(step, weights, state, jnp.zeros(12, jnp.int32))
    assert not set(moved(text)) & forbidden(weights)
    assert aliased(text) == len(jax.tree.leaves(state))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [families.GEMMA_4[0], families.HYBRIDS[0]])
def test_a_donated_state_of_differing_layers_is_written_in_place(name):
    setup, weights = families.prepared(name)
    state = functional.make_state(setup, batch=12, num_pages=PAGES, dtype=jnp.float32)
    step = functools.partial(functional.decode, setup)
    text = compiled_text(step, weights, state, jnp.zeros(12, jnp.int32))
    assert aliased(text) == len(jax.tree.leaves(state))


@pytest.mark.thorough
def test_the_loop_of_a_rollout_copies_neither_weights_nor_pages():
    setup, weights = prepared()
    tokens, lengths = prompts(3)
    run = functools.partial(
        functional.rollout, setup, samples=4, max_new_tokens=7, rows=5, num_pages=PAGES
    )
    keys = jax.random.split(jax.random.key(0), 3)
    text = jax.jit(run).lower(weights, tokens, lengths, keys).compile().as_text()
    assert f"[{PAGES},2,8,8]" in loops(text)
    assert not set(moved(loops(text))) & forbidden(weights)
    # Outside the loops the weights are not copied either; the pools are, when they are made.
    matrices = {tuple(sorted(x.shape)) for x in jax.tree.leaves(weights) if x.ndim > 1}
    assert not set(moved(text)) & matrices


@pytest.mark.thorough
def test_several_steps_at_once_copy_no_pages(tmp_path):
    at_once = 3
    engine = make_engine(write_config(tmp_path / "model"), num_decode_steps=at_once)
    worker: Any = engine._worker
    shape, features = worker.shapes.choose(rows=8, seqs=8), StepFeatures("greedy")
    text = worker._runner.programs.get(multi_step_key(shape, features)).as_text()
    pool = "f32[" + ",".join(str(n) for n in worker._state.arrays.k_pages[0].shape) + "]"
    assert pool in text
    assert not re.findall(rf"= {re.escape(pool)}\S* copy\(", text)
