"""Configs of every family, and other values of every field that one of them knows.

It needs the standard library alone, so that an environment with torch can use it too.
"""

import re

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def of(architecture, **changes):
    """A small config with Llama's fields."""
    return {**LLAMA, "architectures": [f"{architecture}ForCausalLM"], **changes}


FULL = ["full_attention"] * 3
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
# Of queries by position; transformers' Ministral 3 needs both.
BETA = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 2048}
LONGROPE_LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LAYER_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0},
    "sliding_attention": {"rope_type": "default"},
}

WINDOWS = {"use_sliding_window": True, "sliding_window": 9}
EXPERTS = {"moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": None,
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "rope_scaling": YARN,
    "num_hidden_layers": 5,
    **EXPERTS,
}
HYBRID = {
    "num_hidden_layers": 5,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_scaling": YARN,
}
HYBRID_EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2}
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1}
GEMMA4_EXPERTS = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 100,
    "num_experts": 12,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
GEMMA4_SHARED = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
}
# A config of each family, from which a change of any field that is read can be seen.
BASES = {
    "BloomForCausalLM": {
        "architectures": ["BloomForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "n_layer": 3,
        "n_head": 4,
        "max_position_embeddings": 8192,
    },
    "Cohere2ForCausalLM": of("Cohere2", rope_scaling=YARN),
    "DeepseekV2ForCausalLM": of("DeepseekV2", **LATENT),
    "DeepseekV3ForCausalLM": of("DeepseekV3", **LATENT, n_group=2, topk_group=1),
    "Ernie4_5ForCausalLM": of("Ernie4_5", rope_scaling=YARN),
    "Ernie4_5_MoeForCausalLM": of("Ernie4_5_Moe", rope_scaling=YARN, moe_k=2, **EXPERTS),
    "Exaone4ForCausalLM": of("Exaone4", rope_scaling=YARN),
    "Gemma2ForCausalLM": of("Gemma2", rope_scaling=YARN),
    "Gemma3ForCausalLM": of("Gemma3", rope_parameters=LAYER_ROPES),
    "Gemma4ForCausalLM": of("Gemma4", **GEMMA4, **GEMMA4_EXPERTS),
    "Gemma4UnifiedForCausalLM": of("Gemma4Unified", **GEMMA4),
    "Glm4ForCausalLM": of("Glm4", rope_scaling=YARN),
    "GraniteForCausalLM": of("Granite", rope_scaling=YARN),
    "Glm4MoeForCausalLM": of(
        "Glm4Moe", rope_scaling=YARN, n_routed_experts=12, num_experts_per_tok=2
    ),
    "Glm4MoeLiteForCausalLM": of("Glm4MoeLite", **LATENT),
    "GptOssForCausalLM": of("GptOss", rope_scaling=YARN),
    "GraniteMoeForCausalLM": of("GraniteMoe", rope_scaling=YARN),
    "HunYuanDenseV1ForCausalLM": of("HunYuanDenseV1", rope_scaling=YARN, head_dim=16),
    "HunYuanMoEV1ForCausalLM": of(
        "HunYuanMoEV1", rope_scaling=YARN, head_dim=16, num_experts=12, moe_topk=2
    ),
    "LlamaForCausalLM": LLAMA | {"head_dim": 16, "rope_scaling": YARN},
    "MiniMaxM2ForCausalLM": of(
        "MiniMaxM2", rope_scaling=YARN, num_local_experts=12, num_experts_per_tok=2
    ),
    "Ministral3ForCausalLM": of("Ministral3", rope_scaling=YARN | BETA),
    "MinistralForCausalLM": of("Ministral", rope_scaling=YARN, head_dim=16),
    "MistralForCausalLM": of("Mistral", rope_scaling=YARN),
    "MixtralForCausalLM": of("Mixtral", rope_scaling=YARN, head_dim=16),
    "OPTForCausalLM": OPT,
    "Olmo2ForCausalLM": of("Olmo2", rope_scaling=YARN),
    "Olmo3ForCausalLM": of("Olmo3", rope_parameters=LAYER_ROPES),
    "OlmoeForCausalLM": of("Olmoe", rope_scaling=YARN, num_experts_per_tok=2),
    "Phi3ForCausalLM": of("Phi3"),
    "Qwen2ForCausalLM": of("Qwen2", rope_scaling=YARN, **WINDOWS),
    "Qwen2MoeForCausalLM": of("Qwen2Moe", rope_scaling=YARN, **WINDOWS, **EXPERTS),
    "Qwen3ForCausalLM": of("Qwen3", rope_scaling=YARN, **WINDOWS),
    "SeedOssForCausalLM": of("SeedOss", rope_scaling=YARN),
    "SmolLM3ForCausalLM": of("SmolLM3", rope_scaling=YARN, use_sliding_window=True),
    "Qwen3MoeForCausalLM": of("Qwen3Moe", rope_scaling=YARN, num_experts_per_tok=2, **EXPERTS),
    "Qwen3NextForCausalLM": of(
        "Qwen3Next", **HYBRID, **HYBRID_EXPERTS, moe_intermediate_size=32, mlp_only_layers=[0]
    ),
    "Qwen3_5ForCausalLM": of("Qwen3_5", **HYBRID),
    "Qwen3_5MoeForCausalLM": of("Qwen3_5Moe", **HYBRID, **HYBRID_EXPERTS),
}
# Another value of every field that some family reads.
CHANGES = {
    "activation_function": "gelu",
    "attention_bias": True,
    "attention_k_eq_v": True,
    "attention_multiplier": 0.3,
    "attention_out_bias": True,
    "attn_logit_softcapping": 7.0,
    "dtype": "float16",
    "embedding_multiplier": 3.0,
    "decoder_sparse_step": 2,
    "enable_bias": False,
    "enable_moe_block": True,
    "ffn_dim": 80,
    "final_logit_softcapping": 7.0,
    "first_k_dense_replace": 2,
    "full_attention_interval": 2,
    "global_head_dim": 24,
    "head_dim": 32,
    "hidden_act": "gelu",
    "hidden_activation": "gelu",
    "hidden_size": 128,
    "hidden_size_per_layer_input": 6,
    "intermediate_size": 80,
    "kv_lora_rank": 96,
    "layer_norm_eps": 1e-3,
    "layer_norm_epsilon": 1e-3,
    "layer_types": MIXED,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 16,
    "logit_scale": 0.3,
    "logits_scaling": 3.0,
    "max_position_embeddings": 4096,
    "max_window_layers": 1,
    "mlp_bias": True,
    "n_embed": 96,
    "n_head": 8,
    "n_layer": 5,
    "no_rope_layer_interval": 2,
    "no_rope_layers": [1, 0, 0],
    "mlp_layer_types": ["dense", "dense", "sparse", "dense", "sparse"],
    "mlp_only_layers": [1],
    "moe_intermediate_size": 24,
    "moe_k": 1,
    "moe_layer_end_index": 1,
    "moe_layer_interval": 2,
    "moe_layer_start_index": 2,
    "moe_topk": 1,
    "moe_num_experts": 6,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "n_routed_experts": 10,
    "n_shared_experts": 3,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts": 6,
    "num_experts_per_tok": 1,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 1,
    "num_local_experts": 6,
    "original_max_position_embeddings": 1024,
    "partial_rotary_factor": 0.5,
    "per_layer_config": {"2": {"head_dim": 24, "num_key_value_heads": 4}},
    "q_lora_rank": None,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "qkv_bias": False,
    "query_pre_attn_scalar": 20,
    "residual_multiplier": 0.3,
    "rms_norm_eps": 1e-3,
    "rotary_dim": 10,
    "rope_interleave": False,
    "rope_local_base_freq": 5e5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "rope_theta": 5e5,
    "routed_scaling_factor": 2.5,
    "shared_expert_intermediate_size": 24,
    "seq_length": 1024,
    "sliding_window": 7,
    "sliding_window_pattern": 3,
    "swiglu_alpha": 1.5,
    "swiglu_limit": 0.1,
    "tie_word_embeddings": True,
    "top_k_experts": 1,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "torch_dtype": "bfloat16",
    "use_bias": True,
    "use_double_wide_mlp": True,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "v_head_dim": 96,
    "vocab_size": 101,
    "vocab_size_per_layer_input": 110,
}
# Where a family needs another value, and what must stand beside the field for it to matter.
CHANGES_OF = {
    ("Gemma2ForCausalLM", "layer_types"): FULL,
    ("Glm4ForCausalLM", "attention_bias"): False,
    ("Glm4ForCausalLM", "partial_rotary_factor"): 0.25,
    ("Ministral3ForCausalLM", "rope_parameters"): {"rope_type": "default", **BETA},
    ("Ministral3ForCausalLM", "rope_scaling"): {"type": "linear", "factor": 2.0, **BETA},
    ("OPTForCausalLM", "tie_word_embeddings"): False,
    ("Phi3ForCausalLM", "rope_scaling"): {"rope_theta": 5e5},
    ("Olmo3ForCausalLM", "rope_theta"): 7e5,
    **{
        (f"{name}ForCausalLM", field): value
        for name in ("Ernie4_5", "Ernie4_5_Moe")
        for field, value in (
            ("rope_theta", 7e5),
            ("rope_parameters", {"rope_type": "default", "rope_theta": 7e5}),
        )
    },
    ("SeedOssForCausalLM", "attention_bias"): False,
    **{
        (f"{name}ForCausalLM", "tie_word_embeddings"): False
        for name in (
            *("Bloom", "Cohere2", "Ernie4_5", "Ernie4_5_Moe", "Gemma2", "Gemma3", "SmolLM3"),
            *("Gemma4", "Gemma4Unified"),
        )
    },
    **{
        (f"{name}ForCausalLM", field): value
        for name in ("Gemma3", "Olmo3")
        for field, value in (
            ("rope_parameters", {"full_attention": {"rope_theta": 6e5}}),
            ("rope_scaling", {"rope_type": "linear", "factor": 3.0}),
        )
    },
    **{
        (f"{name}ForCausalLM", "rope_parameters"): {
            "full_attention": {"rope_type": "proportional", "rope_theta": 6e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        for name in ("Gemma4", "Gemma4Unified")
    },
    **{
        (f"{name}ForCausalLM", "norm_topk_prob"): False
        for name in ("DeepseekV3", "Glm4Moe", "Glm4MoeLite")
    },
    **{
        (f"{name}ForCausalLM", "num_hidden_layers"): 6
        for name in ("DeepseekV2", "DeepseekV3", "Glm4MoeLite")
    },
    ("DeepseekV3ForCausalLM", "n_group"): 3,
    ("DeepseekV3ForCausalLM", "routed_scaling_factor"): 1.5,
    ("Qwen2MoeForCausalLM", "layer_types"): ["full_attention"] * 3,
    ("Glm4MoeForCausalLM", "partial_rotary_factor"): 1.0,
    ("GptOssForCausalLM", "attention_bias"): False,
    ("GptOssForCausalLM", "layer_types"): ["full_attention"] * 3,
    ("Qwen3MoeForCausalLM", "use_sliding_window"): True,
    ("Qwen3NextForCausalLM", "norm_topk_prob"): False,
    **{
        (f"{name}ForCausalLM", field): value
        for name in ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
        for field, value in (
            ("layer_types", ["full_attention", "linear_attention"] * 2 + ["linear_attention"]),
            ("num_hidden_layers", 6),
        )
    },
}
BESIDE = {
    ("Qwen2MoeForCausalLM", "intermediate_size"): {"mlp_only_layers": [1]},
    ("Qwen3MoeForCausalLM", "intermediate_size"): {"mlp_only_layers": [1]},
    ("Qwen3MoeForCausalLM", "use_sliding_window"): {"sliding_window": 9},
    # With layer_types transformers reads it as Ministral, which needs a head_dim.
    ("MistralForCausalLM", "layer_types"): {"head_dim": 16, "sliding_window": 7},
    ("MinistralForCausalLM", "layer_types"): {"sliding_window": 7},
    ("DeepseekV2ForCausalLM", "intermediate_size"): {"first_k_dense_replace": 1},
    ("Gemma2ForCausalLM", "layer_types"): {"sliding_window": 7},
    ("GptOssForCausalLM", "layer_types"): {"sliding_window": 7},
    **{
        (f"{name}ForCausalLM", field): {"layer_types": MIXED}
        for name in ("Gemma3", "Olmo3")
        for field in ("rope_parameters", "rope_scaling", "rope_theta")
    },
    **{
        ("Gemma4ForCausalLM", field): {"enable_moe_block": True}
        for field in ("moe_intermediate_size", "num_experts", "top_k_experts")
    },
    **{
        (f"{name}ForCausalLM", field): beside
        for name in ("Gemma4", "Gemma4Unified")
        for field, beside in (
            ("num_global_key_value_heads", {"attention_k_eq_v": True}),
            ("rope_parameters", {}),
            ("num_kv_shared_layers", GEMMA4_SHARED | {"num_kv_shared_layers": 0}),
            ("use_double_wide_mlp", GEMMA4_SHARED),
        )
    },
    ("Phi3ForCausalLM", "original_max_position_embeddings"): {
        "rope_scaling": {"type": "longrope", **LONGROPE_LISTS}
    },
    ("SmolLM3ForCausalLM", "sliding_window"): {"layer_types": MIXED, "sliding_window": 9},
    ("SmolLM3ForCausalLM", "use_sliding_window"): {
        "no_rope_layers": [1, 0, 1],
        "sliding_window": 9,
    },
    ("SmolLM3ForCausalLM", "layer_types"): {"sliding_window": 9},
    **{
        (f"{name}ForCausalLM", "topk_group"): {"n_group": 4}
        for name in ("DeepseekV3", "Glm4Moe", "Glm4MoeLite")
    },
    **{
        ("DeepseekV2ForCausalLM", field): {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 1,
        }
        for field in ("n_group", "topk_group")
    },
    ("DeepseekV2ForCausalLM", "topk_method"): {"n_group": 4, "topk_group": 1},
    ("Qwen2MoeForCausalLM", "sliding_window"): {"max_window_layers": 2},
    ("Qwen2MoeForCausalLM", "use_sliding_window"): {"max_window_layers": 2},
    ("Qwen3MoeForCausalLM", "sliding_window"): {"use_sliding_window": True},
    "rope_parameters": {"rope_scaling": None},
    "sliding_window": {"max_window_layers": 0},
    "use_sliding_window": {"max_window_layers": 0},
}
# Values of constrained fields: those that mean the model as it is, and those that must be refused.
ALLOWED = {
    "_remove_final_layer_norm": [False],
    "attn_output_gate": [True],
    "apply_residual_connection_post_layernorm": [False],
    "attention_chunk_size": [],
    "clip_qkv": [],
    "do_layer_norm_before": [True],
    "first_k_dense_replace": [1],
    "head_dim": [64],
    "hidden_act": ["silu", "swish"],
    "is_causal": [True],
    "kv_sharing_modes": [],
    "layer_norm_elementwise_affine": [True],
    "layer_types": [["full_attention"] * 3, []],
    "mlp_bias": [False],
    "model_type": [],
    "moe_layer_freq": [1],
    "moe_norm_min": [1e-12, 0, 1e-20],
    "norm_topk_prob": [False],
    "num_key_value_heads": [4],
    "partial_rotary_factor": [1, 1.0],
    "per_layer_config": [{}],
    "rope_scaling": [],
    "scoring_func": [],
    "sliding_window": [8192, 10**9],
    "topk_method": ["noaux_tc"],
    "transformers_weights": [],
    "use_bias": [False],
    "use_bidirectional_attention": [False],
    "word_embed_proj_dim": [64],
}
SCORES = {"DeepseekV2ForCausalLM": "softmax"}  # and sigmoid in other families
REFUSED = {
    "_remove_final_layer_norm": [True, 1, "no"],
    "apply_residual_connection_post_layernorm": [True, 0],
    "attention_chunk_size": [16],
    "attn_output_gate": [False, 1],
    "clip_qkv": [8.0],
    "do_layer_norm_before": [False, 1],
    "first_k_dense_replace": [0, 3],
    "head_dim": [32, "64"],
    "hidden_act": ["gelu", 1],
    "is_causal": [False, None, 1],
    "kv_sharing_modes": [["none", "reuse", "none"]],
    "layer_norm_elementwise_affine": [False],
    "layer_types": [MIXED, ["sliding_attention"] * 3, "full_attention", [1]],
    "mlp_bias": [True],
    "model_type": ["gemma", "", 3, ["llama"]],
    "moe_layer_freq": [2, True],
    "moe_norm_min": [0.5, -1, "1"],
    "norm_topk_prob": [True, 1],
    "num_key_value_heads": [1, 8, "4"],
    "partial_rotary_factor": [0.5, "1", True, float("nan")],
    "rope_scaling": [{"rope_type": "default", "rope_theta": 5e5}, "text"],
    "scoring_func": ["softmax_of_topk", 1],
    "topk_method": ["greedy", 2],
    "per_layer_config": [{"0": {"rms_norm_eps": 0.5}}, [1]],
    "sliding_window": [16, "no", True, 1e9],
    "transformers_weights": ["other.safetensors"],
    "use_bias": [True, 0],
    "use_bidirectional_attention": [True, 0, "all"],
    "word_embed_proj_dim": [32, 64.0],
}
MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4unified": "gemma4_unified_text",
    "seedoss": "seed_oss",
    "gptoss": "gpt_oss",
    "deepseekv2": "deepseek_v2",
    "deepseekv3": "deepseek_v3",
    "qwen3next": "qwen3_next",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "glm4_moelite": "glm4_moe_lite",
    "minimaxm2": "minimax_m2",
    "hunyuandensev1": "hunyuan_v1_dense",
    "hunyuanmoev1": "hunyuan_v1_moe",
}  # where it does not follow from the architecture
NOT_OF_A_FAMILY = {"architectures", "quantization_config"}  # which has test_toy_int8.py
ARCHITECTURES = sorted(BASES)


def model_types(architecture):
    """The values of model_type that go with an architecture."""
    own = re.sub(r"(?<=\d)(?=Moe)", "_", architecture.removesuffix("ForCausalLM")).lower()
    if own in MODEL_TYPES:
        return [MODEL_TYPES[own]]
    # transformers reads either name of these two as the other's.
    others = {"ministral": ["mistral"], "mistral": ["ministral"]}
    return [own, *others.get(own, [])]


def change_of(architecture, field):
    """(a config, the same with another value of a field that the family reads)."""
    base = BASES[architecture] | BESIDE.get((architecture, field), BESIDE.get(field, {}))
    return base, base | {field: CHANGES_OF.get((architecture, field), CHANGES[field])}
