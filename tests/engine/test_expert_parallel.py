"""Devices that hold whole experts: the operation under any routing, the tokens of the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from rjax.batch.page_groups import one_group
from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import Linear, config_from_dict, place
from rjax.models.schemes import UNQUANTISED
from rjax.pallas_kernels.attention.plan.host import PlanShape
from rjax.pallas_kernels.gemm.activation import Activation
from rjax.worker.backend import choose_backend
from rjax.worker.fingerprint import model_fingerprint
from rjax.worker.kernels.experts_problem import expert_specs, experts_problem
from rjax.worker.kernels.uses import advise_whole_experts
from rjax.worker.memory import workspace_bytes
from rjax.worker.step.shape import StepShape

from .test_experts_engine import MOE

ROOT = Path(__file__).parents[2]
_OPERATION = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from rjax.batch.page_groups import one_group
from rjax.models import Routing, config_from_dict, init_model
from rjax.pallas_kernels.pending import reduced
from rjax.worker.backend import choose_backend
from rjax.worker.paged_operations import PagedOperations
from tests.engine.test_experts_engine import MOE

J, X = 16, 4
config = config_from_dict(MOE | {
    "num_experts": J, "num_experts_per_tok": X, "num_attention_heads": 8, "mlp_only_layers": [],
    "num_hidden_layers": 1,
})

class Step:
    def __init__(self, positions):
        self.positions = positions

    def views(self):
        return ()

def routings(T, draw):
    own = [draw.permutation(J)[:X] for _ in range(T)]
    yield "any", np.stack(own)
    for first in (0, J - X, 6):  # all rows to the experts of one device, or of two
        yield f"from {first}", np.stack([first + draw.permutation(X) for _ in range(T)])
    yield "one expert", np.stack([np.array([3, 9, 12, 5])] * T)

def compute(devices, h, chosen, weights, positions):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    model = models[devices]
    mlp = model.layers[0].mlp
    backend = choose_backend(
        "xla", platform="cpu", compute_capability=None, model=model.config, dtype="float32",
        page_size=8, devices=devices,
    )
    if (devices, h.shape) not in steps:
        def step(up, down, h, chosen, weights, positions):
            operations = PagedOperations([], [], Step(positions), one_group(0), backend, mesh)
            found = operations.experts(h, Routing(chosen, weights), up, down, mlp.activation)
            assert found.summands.shape[0] == devices
            return reduced(found)
        steps[devices, h.shape] = jax.jit(step)
    return np.asarray(steps[devices, h.shape](mlp.up, mlp.down, h, chosen, weights, positions))

steps = {}
models = {
    n: init_model(
        config, dtype="float32", seed=1, expert_parallel=n > 1,
        mesh=Mesh(np.array(jax.devices()[:n]), ("tensor",)),
    )
    for n in (1, 2, 4, 8)
}
for n, model in models.items():
    weight = model.layers[0].mlp.up.weight[...]
    assert {shard.data.shape[0] for shard in weight.addressable_shards} == {J // n}
draw = np.random.default_rng(0)
for T in (1, 5, 70):
    h = jnp.asarray(30 * draw.normal(size=(T, config.hidden_size)), jnp.float32)
    weights = jnp.asarray(draw.random((T, X)), jnp.float32)
    positions = np.arange(T)
    if T > 1:
        positions[-2:] = -1  # padding takes no expert
    for name, chosen in routings(T, draw):
        arguments = h, jnp.asarray(chosen, jnp.int32), weights, jnp.asarray(positions)
        one = compute(1, *arguments)
        assert np.abs(one[: max(1, T - 2)]).max() > 0.001
        for n in (2, 4, 8):
            many = compute(n, *arguments)
            np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-6 * np.abs(one).max())
            if T > 1:
                assert not many[-2:].any()
            of_device = chosen // (J // n)
            alone = (of_device == of_device[:, :1]).all(1)
            # The experts of a row on one device are summed in the order of one device.
            if T > 1:  # the work list of one row on one device is another program
                np.testing.assert_array_equal(many[alone], one[alone], f"{T} {name} {n}")
print("same")
"""
_ENGINE = """
import sys
from tests.engine.test_experts_engine import golden, golden_tokens, requests, tokens
from tests.engine.tiny import make_engine, run

def answers(devices, **options):
    engine = make_engine(sys.argv[1], tensor_parallel_size=devices, **options)
    found = tokens(run(engine, requests(10)))
    return found, engine

spread = {"enable_expert_parallel": True}
one, _ = answers(1, **spread)
for devices in map(int, sys.argv[2].split()):
    found, engine = answers(devices, **spread)
    assert found == one, devices
    uses = {use.operation: use.kernel for use in engine.kernels()}
    assert uses["experts"] == "xla.experts"
if sys.argv[3]:
    quantised = {"quantization": sys.argv[3]}
    assert answers(4, **spread, **quantised)[0] == answers(1, **quantised)[0]
else:  # biases; a shared expert, and copies of KV heads
    for name, devices in (("gpt_oss_j6_k2_yarn", 3), ("glm4_moe_j8_k3_groups", 4)):
        options = {"tensor_parallel_size": devices} | spread
        assert set(golden_tokens(name, **options)) == {golden(name)}, name
print("same")
"""


def run_with_devices(program: str, *arguments: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("same\n")


@pytest.mark.thorough
def test_any_routing_gives_what_one_device_gives():
    run_with_devices(_OPERATION)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "quantization"), [("4", ""), ("2 8", "fp8")])
def test_tokens_are_those_of_one_device(tmp_path, devices, quantization):
    values = MOE | {"num_experts": 8, "num_attention_heads": 8, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(values))
    run_with_devices(_ENGINE, str(tmp_path), devices, quantization)


@pytest.mark.parametrize("parallel", [False, True])
def test_the_problem_of_a_device(parallel):
    mesh = AbstractMesh((4,), ("tensor",))
    values = MOE | {"num_experts": 8, "num_attention_heads": 8, "intermediate_size": 64}
    config = place(config_from_dict(values), 4, expert_parallel=parallel)
    up, down = (
        Linear(*axes, config, jnp.float32, scheme=UNQUANTISED, a=a, bias=True, experts=True)
        for axes, a in ((("D", "A I"), 2), (("I", "D"), 1))
    )
    activation = Activation("silu", gated=True)
    problem = experts_problem(up, down, mesh, rows=3, dtype="float32", activation=activation)
    held, width = (2, 24) if parallel else (8, 6)
    assert problem.experts_elsewhere == 8 - held
    assert problem.columns == (2, width) and problem.needs_partial
    of_up, of_down, up_bias, down_bias = expert_specs(up, down, mesh)
    found = [tuple(spec) for spec in (of_up["weight"], of_down["weight"], up_bias, down_bias)]
    if parallel:
        whole = ("tensor", None, None, None)
        assert found == [whole, whole[:3], whole[:3], (None, "tensor")]
    else:
        cut = (None, None, None, "tensor")
        assert found == [cut, (None, "tensor", None), cut[1:], ("tensor",)]


def test_files_of_prefixes_do_not_depend_on_where_experts_are():
    config = config_from_dict(MOE | {"num_experts": 8})
    leaves = [jnp.arange(5.0)]
    found = {model_fingerprint(place(config, 2, expert_parallel=p), leaves) for p in (False, True)}
    assert len(found) == 1
    assert model_fingerprint(place(config, 4), leaves) not in found  # KV heads are copied


def test_the_workspace_has_room_for_all_rows_on_one_device():
    config = config_from_dict(MOE | {"num_experts": 8, "num_attention_heads": 8})
    plan = PlanShape(64, 8, 128, 8, 16)
    shape = StepShape(64, 8, 16, 8, one_group(config.num_layers), (plan,))
    cut, whole = (
        workspace_bytes(
            place(config, 4, expert_parallel=parallel),
            shape,
            itemsize=2,
            num_slots=8,
            num_devices=4,
        )
        for parallel in (False, True)
    )
    slots = 64 * 2  # pairs, if every tile is full
    assert whole - cut >= slots * 3 * 24 * (2 + 4) * 3 // 4


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shapes", "devices", "said"),
    [
        ("qwen3-30b-a3b", 4, None),
        ("qwen3-30b-a3b", 8, "experts of 2048 x 96; the kernel takes multiples of 64"),
        ("gpt-oss-20b", 2, "experts of 2880 x 1440; the kernel takes multiples of 64"),
        ("gpt-oss-20b", 1, None),
        ("llama-3-8b", 2, None),
    ],
)
def test_an_engine_says_where_whole_experts_would_have_a_kernel(shapes, devices, said):
    config = place(config_from_dict(SHAPES[shapes]), devices)

    def advice(name, config):
        gpu = {"platform": "gpu", "compute_capability": 9.0}
        backend = choose_backend(
            name,
            **(gpu if name == "mosaic" else {"platform": "cpu", "compute_capability": None}),
            model=config,
            dtype=jnp.bfloat16,
            page_size=64,
            devices=devices,
        )
        return advise_whole_experts(backend, config, jnp.bfloat16, devices)

    assert advice("xla", config) is None
    if said is None:
        assert advice("mosaic", config) is None
        return
    assert advice("mosaic", config) == (
        f"experts that are cut over {devices} devices run as xla.experts ({said}); "
        "enable_expert_parallel keeps them whole, for mosaic.grouped_gemm"
    )
    assert advice("mosaic", place(config, devices, expert_parallel=True)) is None
