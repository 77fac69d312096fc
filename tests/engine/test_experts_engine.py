"""Mixtures of experts through the engine: chunks, shared prefixes, preemption, padding, a mesh."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rjax.models import config_from_dict
from rjax.sampling import SamplingParams
from rjax.worker.memory import workspace_bytes

from .tiny import CONFIG, VOCAB, dense, make_engine, run

ROOT = Path(__file__).parents[2]
MOE = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}

pytestmark = pytest.mark.usefixtures("no_annotations_checked", "kept")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "moe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MOE))
    return folder


def requests(count: int):
    """Prompts, some of which share a prefix."""
    rng = np.random.default_rng(3)
    stems = [rng.integers(0, VOCAB, size).tolist() for size in (40, 24, 0)]
    return [
        (
            str(i),
            stems[i % 3] + rng.integers(0, VOCAB, rng.integers(1, 30)).tolist(),
            SamplingParams(temperature=0, max_tokens=int(rng.integers(2, 14)), ignore_eos=True),
        )
        for i in range(count)
    ]


def tokens(outputs):
    return {key: out.outputs[0].token_ids for key, out in outputs.items()}


@pytest.fixture(scope="module")
def plain(folder):
    """Greedy tokens of plain forward passes, one sequence at a time."""
    logits_of = dense(folder)
    found = {}
    for key, prompt, params in requests(30):
        sequence = list(prompt)
        for _ in range(params.max_tokens):
            sequence.append(int(logits_of(sequence)[-1].argmax()))
        found[key] = sequence[len(prompt) :]
    return found


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_relay_attention": "on", "max_num_batched_tokens": 16},
        {"enable_relay_attention": "off", "enable_prefix_caching": False},
        {"max_num_seqs": 1},
    ],
    ids=["auto", "relay-small-chunks", "no-sharing", "one-sequence"],
)
def test_tokens_are_those_of_plain_forward_passes(folder, plain, options):
    engine = make_engine(folder, **options)
    assert tokens(run(engine, requests(30))) == plain
    if not options:
        assert engine.stats().preemptions > 0


def test_kernels_name_the_experts(folder):
    engine = make_engine(folder)
    uses = {use.operation: use for use in engine.kernels()}
    assert uses["experts"].kernel == "xla.experts"
    assert {"linear", "activation"} <= uses.keys()  # of the dense layer


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantization", ["fp8", *(pytest.param(x, marks=pytest.mark.slow) for x in ("int8", "int4"))]
)
def test_quantised_experts_answer_as_their_dequantised_weights(folder, quantization):
    engine = make_engine(folder, quantization=quantization)
    uses = {use.label: use for use in engine.kernels() if use.operation == "experts"}
    assert uses["D -> I -> D"].kernel == "xla.experts"
    found = tokens(run(engine, requests(12)))
    options = {"max_num_batched_tokens": 16, "enable_relay_attention": "on"}
    chunked = make_engine(folder, quantization=quantization, **options)
    assert tokens(run(chunked, requests(12))) == found


def test_the_workspace_counts_the_rows_of_experts(folder):
    engine = make_engine(folder)
    shape = engine._worker.shapes.largest
    config = config_from_dict(MOE | {"num_experts": 128, "num_experts_per_tok": 8})
    more = config_from_dict(MOE | {"num_experts": 128, "num_experts_per_tok": 16})
    sizes = [
        workspace_bytes(one, shape, itemsize=2, num_slots=8, num_devices=1)
        for one in (config, more)
    ]
    assert sizes[1] - sizes[0] >= shape.rows * 8 * (config.hidden_size * 4 + 2 * 24 * 4)


GOLDENS = ROOT / "tests" / "golden" / "experts"


@pytest.mark.parametrize("relay", ["on", pytest.param("off", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("deepseek_v2_j8_k3_groups", marks=pytest.mark.thorough),
        "glm4_moe_j8_k3_groups",
        "gpt_oss_j6_k2_yarn",
        "qwen2_moe_j6_k2_shared",
    ],
)
def test_greedy_tokens_are_those_of_transformers(name, relay):
    assert set(golden_tokens(name, enable_relay_attention=relay)) == {golden(name)}


def golden(name):
    return tuple(load_file(GOLDENS / "expected" / f"{name}.safetensors")["greedy"].tolist())


def golden_tokens(name, **options):
    """Greedy tokens of two requests with the prompt of a golden case, beside a third request."""
    expected = load_file(GOLDENS / "expected" / f"{name}.safetensors")
    settings = {"load_format": "auto", "dtype": "float32", "max_model_len": 64} | options
    engine = make_engine(GOLDENS / "models" / name, **settings)
    prompt = expected["prompt"].tolist()
    params = SamplingParams(temperature=0, max_tokens=len(expected["greedy"]), ignore_eos=True)
    answers = run(engine, [("a", prompt, params), ("b", prompt, params), ("c", [1], params)])
    engine.close()
    return [tuple(answers[key].outputs[0].token_ids) for key in ("a", "b")]


_MESH = """
import sys
from pathlib import Path
from tests.engine.test_experts_engine import golden, golden_tokens, requests, tokens
from tests.engine.tiny import make_engine, run
folder = Path(sys.argv[1])
one, two = (
    tokens(run(make_engine(folder, tensor_parallel_size=n), requests(8))) for n in (1, 2)
)
assert one == two
for name in ("gpt_oss_j6_k2_yarn", "glm4_moe_j8_k3_groups", "deepseek_v3_j8_k3_groups"):
    assert set(golden_tokens(name, tensor_parallel_size=2)) == {golden(name)}, name
print("same")
"""


@pytest.mark.slow
def test_two_devices_answer_as_one(folder):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    found = subprocess.run(
        [sys.executable, "-c", _MESH, str(folder)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.endswith("same\n")
