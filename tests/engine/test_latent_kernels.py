"""Models with latent attention in the engine: kernels on Hopper, quantised weights, fp8 KV."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rjax.batch.page_groups import one_group
from rjax.benchmarks.model_shapes import SHAPES
from rjax.build import plan_engine
from rjax.models import Decoder, config_from_dict
from rjax.models.sharding import single_device_mesh
from rjax.pallas_kernels.gemm.skinny_gemm import ROWS
from rjax.sampling import SamplingParams, init_state
from rjax.worker.backend import choose_backend
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.layout import PackedLayout
from rjax.worker.step.program import compile_step
from rjax.worker.step.shape import StepShape
from rjax.worker.step.state import StepState
from tests.models.quantised_files import write_quantised

from .test_few_rows import PlainForms
from .tiny import CONFIG, make_engine, run
from .virtual_devices import run_on_virtual_devices

pytestmark = pytest.mark.usefixtures("no_annotations_checked")


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(
    ("shapes", "rows", "kv_dtype"),
    [
        ("deepseek-v2-lite", 1, jnp.bfloat16),
        ("deepseek-v2-lite", 8, jnp.float8_e4m3fn),
        ("glm-4.7-flash", 8, jnp.bfloat16),
    ],
)
def test_every_operation_has_a_mosaic_kernel(shapes, rows, kv_dtype):
    """A whole step, lowered for CUDA; its heads have 192 or 256 dims, of which 64 rotate."""
    config = config_from_dict(SHAPES[shapes] | {"num_hidden_layers": 2})
    dtype, kv_dtype = jnp.dtype(jnp.bfloat16), jnp.dtype(kv_dtype)
    backend = choose_backend(
        "auto",
        platform="gpu",
        compute_capability=9.0,
        model=config,
        dtype=dtype,
        page_size=64,
        kv_dtype=None if kv_dtype == dtype else kv_dtype,
    )
    assert backend.name == "mosaic"
    plan = backend.plan_shape(rows, rows, 1024, 64, coalesce=True)
    shape = StepShape(rows, rows, 16, 64, one_group(config.num_layers), (plan,))
    layout = PackedLayout(shape)
    graph, weights = nnx.split(Decoder(config, dtype))
    leaves, tree = jax.tree.flatten(weights)
    features, choices = StepFeatures("greedy"), []
    step = compile_step(
        graph, tree, layout, features, backend, single_device_mesh(), choices.extend
    )
    page = (20, config.num_kv_heads, 64, config.head_dim)
    pools = [jax.ShapeDtypeStruct(page, kv_dtype)] * 2
    sampling = jax.eval_shape(lambda: init_state(8, config.vocab_size))
    last_tokens = jax.ShapeDtypeStruct((8,), jnp.int32)
    state = StepState(pools, pools, sampling, last_tokens, None)
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
    lowered = step.trace(leaves, state, packed).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
    chosen = {(c.problem.label, c.kernel.name) for c in choices if c.kernel is not None}
    others = {use for use in chosen if not use[1].startswith("mosaic")}
    # One row takes depths of multiples of 128, which 10,944 inputs are not.
    few = rows == 1
    assert others == ({("F -> D", "xla.linear")} if few else set())
    output = "mosaic.merge_split_k" if few else "mosaic.split_k"
    assert {("N O -> D", output), ("Z -> N E", "mosaic.split_k")} <= chosen


LATENT = CONFIG | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 160,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 48,
}
PREFIX = list(range(3, 40))
REQUESTS = [
    (str(i), prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for i, prompt in enumerate(([*PREFIX, 1], [*PREFIX, 2, 9], [5] * 20, [7]))
]


def answers(folder, **options) -> dict[str, list[int]]:
    engine = make_engine(folder, **{"load_format": "auto", "num_pages": 40} | options)
    done = run(engine, REQUESTS)
    engine.close()
    return {name: output.outputs[0].token_ids for name, output in done.items()}


_MESH = """
from tests.engine.test_latent_kernels import answers
print(answers({folder!r}, tensor_parallel_size=2))
"""


@pytest.mark.slow
def test_blocks_of_fp8_give_the_tokens_of_the_dequantised_weights(tmp_path):
    quantised, plain = write_quantised(tmp_path, LATENT, "deepseek-fp8", seed=4)
    want = answers(plain)
    assert len({tuple(tokens) for tokens in want.values()}) > 1
    assert answers(quantised) == want
    found = run_on_virtual_devices(_MESH.format(folder=str(quantised)), 2)
    assert found.splitlines()[-1] == str(want)


@pytest.mark.thorough
def test_fp8_kv_does_not_depend_on_relay(tmp_path):
    _, plain = write_quantised(tmp_path, LATENT, "w8a8", seed=4)
    found = [
        answers(plain, kv_cache_dtype="fp8", enable_relay_attention=relay)
        for relay in ("on", "off")
    ]
    assert found[0] == found[1]


@pytest.mark.thorough
def test_results_that_the_output_projection_merges(tmp_path, monkeypatch):
    """As on Hopper: attention of one row is merged by the projection, which has no padding."""
    _, plain = write_quantised(tmp_path, LATENT, "w8a8", seed=4)
    want = answers(plain, max_num_seqs=1)
    forms = PlainForms(ROWS, fused=True)

    def choose(*arguments, **options):
        return forms.taken_by(choose_backend(*arguments, **options), options["model"])

    monkeypatch.setattr(plan_engine, "choose_backend", choose)
    assert answers(plain, max_num_seqs=1) == want
    assert {("merge_linear", 1), ("linear", 1)} <= forms.called
    assert ("norm_linear", 1) not in forms.called  # two projections need the normed rows
