"""Families that reach kernels in different ways, and meshes: mosaic beside plain JAX on one GPU."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rjax import LLM, SamplingParams

pytestmark = pytest.mark.gpu

_COMMON = {"vocab_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 2048}
_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
FAMILIES = {
    "llama": {"hidden_size": 1024, "intermediate_size": 2048} | _HEADS,
    "llama_biases": {
        "model_type": "llama",
        "hidden_size": 576,  # no multiple of 128
        "intermediate_size": 1536,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_bias": True,
        "mlp_bias": True,
    },
    # On two GPUs, both have the KV head.
    "llama_one_kv_head": {"hidden_size": 1024, "intermediate_size": 2048, "model_type": "llama"}
    | {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 64},
    "qwen2": {"hidden_size": 1024, "intermediate_size": 2048}
    | _HEADS
    | {"head_dim": None, "tie_word_embeddings": True},
    "qwen3": {"hidden_size": 1024, "intermediate_size": 3072} | _HEADS | {"head_dim": 128},
    "phi3": {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 8}
    | {"num_key_value_heads": 2, "pad_token_id": 0},
    # Mixtures take all experts of each row: rounding would choose between two with equal scores.
    "qwen3_moe": {"hidden_size": 1024, "intermediate_size": 2048}
    | _HEADS
    | {"num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 256}
    | {"mlp_only_layers": [0], "head_dim": 128, "norm_topk_prob": True},
    "gpt_oss": {"hidden_size": 640, "intermediate_size": 384, "swiglu_limit": 7.0}
    | _HEADS
    | {"num_local_experts": 8, "num_experts_per_tok": 8, "sliding_window": 64}
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
    "gpt_oss_mxfp4": {"hidden_size": 640, "intermediate_size": 384, "swiglu_limit": 7.0}
    | _HEADS
    | {"num_local_experts": 8, "num_experts_per_tok": 8, "sliding_window": 64}
    | {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
    # Latent attention: padded values; queries of a latent.
    "deepseek_v2": {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    | {"q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 256, "first_k_dense_replace": 1},
    "glm4_moe_lite": {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    | {"n_routed_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 256}
    | {"num_key_value_heads": 8},
    # Linear attention beside gated attention; values share a key or have one each.
    "qwen3_5_text": {"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 256}
    | {"num_attention_heads": 8, "num_key_value_heads": 2}
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"hidden_size": 1024, "head_dim": 256}
    | {"num_attention_heads": 8, "num_key_value_heads": 2}
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "moe_intermediate_size": 256}
    | {"num_experts": 8, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 256}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "opt": {"hidden_size": 1024, "ffn_dim": 2048, "num_attention_heads": 16},
    # Norms of outputs, soft caps, windows and ropes a layer; interleaved pairs; parallel; ALiBi.
    "gemma2": {"hidden_size": 1024, "intermediate_size": 2048, "sliding_window": 64} | _HEADS,
    "gemma3_text": {"hidden_size": 1024, "intermediate_size": 2048, "sliding_window": 64}
    | _HEADS
    | {"sliding_window_pattern": 2},
    # Heads of 512 in full layers, whose values are their keys before norms, beside windows of 256.
    "gemma4_text": {"hidden_size": 1024, "intermediate_size": 2048, "sliding_window": 64}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    | {"num_global_key_value_heads": 1, "global_head_dim": 512, "attention_k_eq_v": True}
    | {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
    | {"hidden_size_per_layer_input": 0},
    "olmo2": {"hidden_size": 1024, "intermediate_size": 2048} | _HEADS,
    "glm4": {"hidden_size": 1024, "intermediate_size": 2048} | _HEADS,
    "cohere2": {"hidden_size": 1024, "intermediate_size": 2048, "sliding_window": 64}
    | _HEADS
    | {"sliding_window_pattern": 2},
    "bloom": {"hidden_size": 1024, "n_layer": 2, "n_head": 16},
}
NAMES = {
    "deepseek_v2": "DeepseekV2",
    "gemma3_text": "Gemma3",
    "gemma4_text": "Gemma4",
    "glm4_moe_lite": "Glm4MoeLite",
    "gpt_oss": "GptOss",
    "opt": "OPT",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_moe": "Qwen3Moe",
}
TOLERANCE = 0.06  # of a logprob; bfloat16 keeps 8 bits, and these models have two layers


def fields_of(family: str) -> dict[str, Any]:
    """What config.json says."""
    fields = {"model_type": family, **_COMMON, **FAMILIES[family]}
    kind = fields["model_type"]
    fields["architectures"] = [f"{NAMES.get(kind, kind.capitalize())}ForCausalLM"]
    fields = {name: value for name, value in fields.items() if value is not None}
    return fields | {"bos_token_id": 1, "eos_token_id": 2}


def folder(root: Path, family: str) -> Path:
    path = root / family
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields_of(family)))
    return path


def prompts() -> list[list[int]]:
    """Some that share two pages and some that share nothing, of any length."""
    draw = np.random.default_rng(11)
    stem = draw.integers(3, 500, 128).tolist()
    own = [draw.integers(3, 500, int(n)).tolist() for n in draw.integers(1, 150, 12)]
    return [(stem if i % 2 else []) + tokens for i, tokens in enumerate(own)]


def answers(path: Path, count: int, **options):
    llm = LLM(
        model=str(path),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_num_seqs=16,
        max_model_len=512,
        num_pages=128,
        use_tqdm=False,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=20)
    outputs = llm.generate(prompts()[:count], params, use_tqdm=False)
    return [o.outputs[0] for o in outputs], llm


def same_up_to_rounding(found, expected, tolerance: float = TOLERANCE) -> None:
    """Until a row's tokens part, which near ties may; the token that parts it has to be one."""
    for got, want in zip(found, expected, strict=True):
        for i, token in enumerate(got.token_ids):
            near = want.logprobs[i][token].logprob
            assert abs(got.logprobs[i][token].logprob - near) < tolerance
            best = want.token_ids[i]
            if token != best:
                assert want.logprobs[i][best].logprob - near < tolerance
                break


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("devices", [1, 2])
def test_the_kernels_compute_what_plain_jax_does(family, devices, tmp_path):
    if jax.device_count() < devices:
        pytest.skip("one GPU")
    path = folder(tmp_path, family)
    for count in (12, 1):
        plain, _ = answers(path, count, backend="xla")
        fast, llm = answers(path, count, backend="mosaic", tensor_parallel_size=devices)
        same_up_to_rounding(fast, plain)
        used = {use.kernel for use in llm.kernels() if use.kernel is not None}
        assert any(kernel.startswith("mosaic.") for kernel in used)
        if devices == 1 and family in ("llama", "qwen2", "qwen3"):
            assert "mosaic.one_row_layer" in used
        for use in llm.kernels():
            print(family, devices, use.rows, use)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_two_gpus_with_whole_experts(quantization, tmp_path):
    if jax.device_count() < 2:
        pytest.skip("one GPU")
    path = folder(tmp_path, "qwen3_moe")
    options = {"quantization": quantization}
    spread = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    for count in (12, 1):
        plain, _ = answers(path, count, backend="xla", **options)
        fast, llm = answers(path, count, backend="mosaic", **options, **spread)
        same_up_to_rounding(fast, plain)
        used = {use.kernel for use in llm.kernels() if use.operation == "experts"}
        assert used == {f"mosaic.{'quantised_experts' if quantization else 'grouped_gemm'}"}


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("devices", [1, 2])
def test_kernels_read_quantised_experts(quantization, devices, tmp_path):
    if jax.device_count() < devices:
        pytest.skip("one GPU")
    path = folder(tmp_path, "qwen3_moe")
    options = {"quantization": quantization}
    for count in (12, 1):
        plain, _ = answers(path, count, backend="xla", **options)
        options_of_mosaic = options | {"tensor_parallel_size": devices}
        fast, llm = answers(path, count, backend="mosaic", **options_of_mosaic)
        if quantization != "fp8":  # whose other projections have fp8 activations on Hopper
            same_up_to_rounding(fast, plain)
        used = {use.kernel for use in llm.kernels() if use.operation == "experts"}
        assert used == {"mosaic.quantised_experts"}


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_few_bit_weights_take_one_kernel_a_layer(quantization, tmp_path):
    path, options = folder(tmp_path, "qwen3"), {"quantization": quantization, "dequantize": "off"}
    plain, _ = answers(path, 1, backend="xla", **options)
    fast, llm = answers(path, 1, backend="mosaic", **options)
    # The prompt's rows become fp8, each with one scale, where plain JAX keeps bfloat16.
    same_up_to_rounding(fast, plain, 0.2 if quantization == "fp8" else TOLERANCE)
    assert "mosaic.one_row_layer" in {use.kernel for use in llm.kernels()}
