"""A weight scheme and a kernel that nothing in the package names, through the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rjax.models import CheckpointError, config_from_folder, load_model

from .tiny import CONFIG

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import json, sys
from rjax.sampling import SamplingParams
from tests.engine import toy_int8
from tests.engine.tiny import make_engine, run

folder, devices = sys.argv[1], int(sys.argv[2])
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
prompts = [[1, 2, 3], [4] * 20, [7, 9]]
engine = make_engine(
    folder, load_format="auto", num_pages=40, tensor_parallel_size=devices
)
done = run(engine, [(str(i), p, params) for i, p in enumerate(prompts)])
kernels = {
    (entry.operation, entry.label): entry.kernel
    for entry in engine.kernels() if entry.rows == 8
}
print(json.dumps({
    "tokens": [done[str(i)].outputs[0].token_ids for i in range(len(prompts))],
    "called": sorted(toy_int8.CALLED),
    "kernels": [[*key, kernel] for key, kernel in sorted(kernels.items())],
}))
"""


EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A model with int8 weights, and the same with those dequantised."""
    return write_folders(tmp_path_factory.mktemp("int8"))


def write_folders(root: Path, experts: int = 0) -> tuple[Path, Path]:
    toy, plain = root / "toy", root / "plain"
    draw = np.random.default_rng(3)
    D, F, V = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    H = CONFIG["head_dim"]
    N, K = CONFIG["num_attention_heads"] * H, CONFIG["num_key_value_heads"] * H
    tensors = {
        "model.embed_tokens.weight": draw.normal(size=(V, D)).astype(np.float32),
        "model.norm.weight": np.ones(D, np.float32),
        "lm_head.weight": draw.normal(size=(V, D)).astype(np.float32),
    }
    linears = {}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{norm}.weight"] = np.ones(D, np.float32)
        shapes = {
            "self_attn.q_proj": (N, D),
            "self_attn.k_proj": (K, D),
            "self_attn.v_proj": (K, D),
            "self_attn.o_proj": (D, N),
        }
        for j in range(experts):
            expert = f"block_sparse_moe.experts.{j}"
            shapes |= {f"{expert}.w1": (F, D), f"{expert}.w3": (F, D), f"{expert}.w2": (D, F)}
        if experts:
            router = draw.normal(size=(experts, D)).astype(np.float32)
            tensors[f"{layer}block_sparse_moe.gate.weight"] = router
        else:
            shapes |= {"mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
        for name, shape in shapes.items():
            weight = draw.integers(-127, 128, shape).astype(np.int8)
            scale = draw.uniform(0.5, 2, shape[0]).astype(np.float32) / 127 / shape[1] ** 0.5
            linears[layer + name] = weight, scale
    values = CONFIG | (EXPERTS if experts else {})
    for folder, config in (
        (toy, values | {"quantization_config": {"quant_method": "toy_int8"}}),
        (plain, values),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    quantised = {f"{name}.weight": weight for name, (weight, _) in linears.items()}
    quantised |= {f"{name}.weight_scale": scale for name, (_, scale) in linears.items()}
    save_file(tensors | quantised, toy / "model.safetensors")
    whole = {f"{name}.weight": w * scale[:, None] for name, (w, scale) in linears.items()}
    save_file(tensors | whole, plain / "model.safetensors")
    return toy, plain


def answers(folder: Path, devices: int) -> dict:
    flags = f"--xla_force_host_platform_device_count={devices}"
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder), str(devices)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.slow
def test_on_one_device_and_on_two(folders):
    toy, plain = folders
    want = answers(plain, 1)
    assert not want["called"]
    axes = {"D -> K A H", "N H -> D", "D -> A F", "F -> D"}
    for devices in (1, 2):
        found = answers(toy, devices)
        assert found["tokens"] == want["tokens"]
        assert {label for label, _ in found["called"]} == axes
        assert ["linear", "F -> D", "toy.int8"] in found["kernels"]


def test_a_tensor_of_another_type_is_refused(folders, tmp_path):
    toy, plain = folders
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    tensors = load_file(toy / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if not name.endswith("scale")},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"_proj.weight has the type I8; supported here"):
        load_model(tmp_path, dtype=None, progress=False)


@pytest.mark.slow
def test_experts_on_one_device_and_on_two(tmp_path):
    toy, plain = write_folders(tmp_path, EXPERTS["num_local_experts"])
    want = answers(plain, 1)
    for devices in (1, 2):
        found = answers(toy, devices)
        assert found["tokens"] == want["tokens"]
        assert {label for label, _ in found["called"]} == {"D -> K A H", "N H -> D"}
        assert ["experts", "D -> I -> D", "xla.experts"] in found["kernels"]


def test_an_unknown_scheme_is_refused(folders, tmp_path):
    _, plain = folders
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "nobody"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quant_method 'nobody', which is not supported"):
        config_from_folder(tmp_path)
