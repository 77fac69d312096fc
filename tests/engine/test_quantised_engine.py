"""Engines on quantised weights: the tokens of the weights that the files mean."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from rjax import LLM
from rjax.config.option_docs import engine_option_docs
from rjax.engine.arg_utils import EngineArgs
from rjax.errors import InvalidConfigError
from rjax.models import CheckpointError, Decoder, config_from_folder
from rjax.models.loading.config import quantization_names
from rjax.models.schemes import ON_LOAD, scaled
from rjax.models.schemes.values import Values
from rjax.sampling import SamplingParams
from rjax.worker.kernels.linear_problem import linear_sharding
from tests.models.mxfp4_files import write_mxfp4
from tests.models.quantised_files import write_quantised

from .tiny import CONFIG, make_engine, run

ROOT = Path(__file__).parents[2]
# Groups of 32 and blocks of 128 fit on two devices.
SHAPES = CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "head_dim": 32,
}
pytestmark = pytest.mark.usefixtures("kept")

PREFIX = list(range(3, 40))
REQUESTS = [
    (str(i), prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for i, prompt in enumerate(([*PREFIX, 1], [*PREFIX, 2, 9], [5] * 20, [7]))
]
_PROGRAM = """
import json, sys
from tests.engine.test_quantised_engine import answers
print(json.dumps(answers(sys.argv[1], tensor_parallel_size=2)))
"""


def answers(folder, **options) -> dict[str, list[int]]:
    engine = make_engine(folder, **{"load_format": "auto", "num_pages": 40} | options)
    done = run(engine, REQUESTS)
    return {name: output.outputs[0].token_ids for name, output in done.items()}


AS_IN_CHECKPOINTS = [
    "awq",
    pytest.param("w4a16", marks=pytest.mark.slow),  # int4, as awq
    "deepseek-fp8",
    "w8a8",
]


@pytest.fixture(scope="module", params=AS_IN_CHECKPOINTS)
def folders(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("quantised")
    return write_quantised(root, SHAPES, request.param, seed=4)


@pytest.mark.sample(0, 1)
def test_tokens_are_those_of_the_dequantised_weights(folders):
    quantised, plain = folders
    want = answers(plain)
    assert answers(quantised) == want
    assert answers(quantised, enable_relay_attention="off") == want


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("awq", marks=pytest.mark.slow), "deepseek-fp8"])
def test_on_two_devices(name, tmp_path):
    quantised, plain = write_quantised(tmp_path, SHAPES, name, seed=4)
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(quantised)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ
        | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert json.loads(found.stdout.splitlines()[-1]) == answers(plain)


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_quantised_at_loading(tmp_path, quantization):
    _, plain = write_quantised(tmp_path, SHAPES, "w8a8")
    engine = make_engine(plain, load_format="auto", quantization=quantization)
    done = run(engine, REQUESTS[:2])
    assert all(len(output.outputs[0].token_ids) == 8 for output in done.values())
    assert engine.summary["weights"].startswith(f"{quantization} (quantised at loading), ")


def test_the_method_of_the_checkpoint_by_name(tmp_path):
    quantised, _ = write_quantised(tmp_path, SHAPES, "w8a8")
    engine = make_engine(quantised, load_format="auto", quantization="compressed-tensors")
    assert engine.summary["weights"].startswith("int8 (as in the checkpoint), ")


def test_what_does_not_fit_the_checkpoint(tmp_path):
    quantised, plain = write_quantised(tmp_path, SHAPES, "w8a8")
    with pytest.raises(CheckpointError, match="'int4', but the checkpoint is quantised as"):
        make_engine(quantised, quantization="int4")
    with pytest.raises(CheckpointError, match="the checkpoint is not quantised; to quantise it"):
        make_engine(plain, quantization="awq")
    with pytest.raises(InvalidConfigError, match="quantization is 'int3'; choose one of fp8"):
        make_engine(plain, quantization="int3")


def test_an_unknown_name_is_told_the_registered_ones():
    listed = re.escape(", ".join(quantization_names()))
    for make in (LLM, EngineArgs):
        with pytest.raises(
            InvalidConfigError, match=f"'mxfp'; choose one of {listed}; did you mean"
        ):
            make("/nowhere", quantization="mxfp")
        with pytest.raises(InvalidConfigError, match=f"'none'; choose one of {listed}$"):
            make("/nowhere", quantization="none")
        with pytest.raises(InvalidConfigError, match="quantization is 4; give a name"):
            make("/nowhere", quantization=4)


def test_the_documentation_has_every_name():
    text = engine_option_docs()["quantization"]
    assert all(re.search(rf"\b{name}\b", text) for name in quantization_names())


@pytest.mark.thorough
def test_a_scheme_from_outside_is_taken_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(scaled, "_VALUES", dict(scaled._VALUES))
    monkeypatch.setitem(ON_LOAD, "int3", None)  # removed again at the end
    int3 = Values("int3", np.dtype(np.int8), largest=3.0, random_scale=0.01)
    scaled.register_values(int3, on_load=scaled.Scaled("int3", (1, 32)))
    _, plain = write_quantised(tmp_path, SHAPES, "w8a8")
    assert EngineArgs(str(plain), quantization="int3").quantization == "int3"
    engine = make_engine(plain, load_format="auto", quantization="int3")
    assert engine.summary["weights"].startswith("int3 (quantised at loading), ")
    assert len(run(engine, REQUESTS[:1])["0"].outputs[0].token_ids) == 8


GPT_OSS = CONFIG | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}


@pytest.mark.thorough
def test_experts_in_mxfp4_answer_as_the_checkpoint_of_the_same_weights(tmp_path):
    stored, exact = write_mxfp4(tmp_path, GPT_OSS)
    length = CONFIG["max_position_embeddings"]
    want = answers(stored, max_model_len=length)
    assert answers(exact, max_model_len=length, quantization="mxfp4") == want
    # The method of the checkpoint itself changes nothing.
    assert answers(stored, max_model_len=length, quantization="mxfp4") == want


def test_mxfp4_of_a_model_without_experts(tmp_path):
    _, plain = write_quantised(tmp_path, SHAPES, "w8a8")
    with pytest.raises(CheckpointError, match="only the experts of a model, but"):
        make_engine(plain, quantization="mxfp4")


def test_blocks_that_devices_would_cut(tmp_path):
    quantised, _ = write_quantised(tmp_path, SHAPES | {"intermediate_size": 192}, "deepseek-fp8")
    mesh = AbstractMesh((4,), ("tensor",))
    config = config_from_folder(quantised)
    down = Decoder(config, jnp.float32).layers[0].mlp.down
    with pytest.raises(ValueError, match=r"axis F .* has 3 entries, which 4 devices cannot divide"):
        linear_sharding(down, mesh)
