"""``rjax models``, ``rjax info``, and the summary of a start."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from rjax import __main__ as command
from rjax.build.engine_builder import build_engine
from rjax.build.summary import summary_lines
from rjax.config import EngineConfig
from rjax.config.memory_sizes import GIB
from rjax.models import BUNDLED_MODEL, Decoder, config_from_folder
from rjax.models.families import FAMILIES
from tests.serve.live_server import OPTIONS, write_model

TESTS = Path(__file__).parents[1]


def test_models_lists_the_registry(capsys):
    assert command.run(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [family["architecture"] for family in found["families"]] == list(FAMILIES)
    assert "unquantised" in found["weights"]
    assert command.run(["models"]) == 0
    out = capsys.readouterr().out
    for family in FAMILIES.values():
        assert family.architecture in out
        assert family.models in out


def bundled_weight_bytes() -> int:
    """In float32, the dtype on a CPU."""
    return Decoder(config_from_folder(BUNDLED_MODEL), jnp.float32).weight_bytes


def test_info_tells_what_runs_and_why(capsys):
    assert command.run(["info", "--json", "--max-num-seqs", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"rjax", "python", "jax", "jax-triton"} <= found["versions"].keys()
    assert found["devices"][0]["platform"] == "cpu"
    assert found["backends"]["xla"] == "in use"
    assert "needs a Hopper GPU" in found["backends"]["mosaic"]
    assert {use["rows"] for use in found["kernels"]} == {1, 4, 512}
    assert found["weight_bytes_per_device"] == bundled_weight_bytes()
    assert {use["kernel"] for use in found["kernels"]} >= {"xla.paged_attention", "xla.linear"}


def test_info_of_a_model_needs_no_weights(capsys, tmp_path):
    folder = write_model(tmp_path / "model")
    assert command.run(["info", str(folder), "--dtype", "bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    columns = {len(line) - len(line.split("  ", 1)[1].lstrip()) for line in lines[:10]}
    assert len(columns) == 1, "the values are aligned"
    assert any(line.startswith("operation") and "512 rows a step" in line for line in lines)
    assert any(line.startswith("weights") and "GiB on each device" in line for line in lines)
    assert any(line.startswith("dtype") and line.endswith("bfloat16") for line in lines)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/nowhere"], "/nowhere"),
        (["--tensor-parallel-size", "64"], "tensor_parallel_size is 64"),
        (["--backend", "mosaic"], "it needs a Hopper GPU"),
        (["--page-size", "7"], "page_size is 7"),
    ],
)
def test_wrong_input_is_one_line(argv, said, capsys):
    assert command.run(["info", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize(
    ("name", "media"),
    [("gemma3vl_g3_h32_windows", "images"), ("qwen3vl_g1_h24_bias", "images and video")],
)
def test_a_start_says_that_text_alone_is_served(name, media, capsys):
    folder = str(TESTS / "golden" / "multimodal" / "models" / name)
    said = f"text only: the model also takes {media}, which rjax does not serve"
    options = {"skip_tokenizer_init": True, **OPTIONS, "max_num_seqs": 2, "max_model_len": 64}
    engine = build_engine(EngineConfig.from_options({"model": folder, **options}))
    assert [line for line in summary_lines(engine.summary) if said in line] == [
        f"input         {said}"
    ]
    engine.close()
    assert command.run(["info", folder]) == 0
    out = capsys.readouterr().out
    assert out.count(said) == 1


def test_the_summary_of_a_start(tmp_path):
    folder = write_model(tmp_path / "model")
    engine = build_engine(EngineConfig.from_options({"model": str(folder), **OPTIONS}))
    stats = engine.stats()
    names = [
        "model",
        "input",
        "weights",
        "dtype",
        "context",
        "KV pool",
        "batch",
        "decode steps",
        "backend",
    ]
    assert list(engine.summary) == [*names, "kernels"]
    assert engine.summary["model"] == f"{folder} (LlamaForCausalLM)"
    assert engine.summary["input"] == "text"
    assert engine.summary["context"] == "512 tokens"
    size = f"{stats.kv_bytes_total / GIB:.2f} GiB"
    assert engine.summary["KV pool"] == f"8,192 tokens (1,024 pages of 8, {size})"
    assert engine.summary["decode steps"] == "each starts as one program"
    assert engine.summary["backend"] == "xla on 1 x cpu"
    lines = summary_lines({**engine.summary, "address": "http://x/v1"})
    assert lines[-1].split() == ["address", "http://x/v1"]
    places = zip(lines, engine.summary.values(), strict=False)
    assert {line.index(value) for line, value in places} == {lines[-1].index("http")}
