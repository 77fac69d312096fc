"""The refusal of a checkpoint says what it is."""

import pytest
from field_cases import LLAMA, of

from rjax import models

OTHER = {"hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"architectures": ["Dots1ForCausalLM"], "model_type": "dots1"} | OTHER,
            "of a family that is unknown here; CONTRIBUTING.md says how to add one",
        ),
        (
            {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"} | OTHER,
            "of a family that is unknown here",
        ),
        (
            {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "state_size": 128},
            "it is a state-space or recurrent model",
        ),
        (
            {"architectures": ["NewForCausalLM"], "conv_kernel": 4, "num_heads": 8} | OTHER,
            "it is a state-space or recurrent model",
        ),
        (
            of("OlmoHybrid", layer_types=["linear_attention", "full_attention"]),
            "it is a hybrid of attention and recurrent layers",
        ),
        (of("Bamba", mamba_d_state=128), "it is a hybrid of attention and recurrent layers"),
        (of("Lfm2", layer_types=["conv", "full_attention"]), "it is a hybrid"),
        (
            {
                "architectures": ["PixtralForConditionalGeneration"],
                "model_type": "pixtral",
                "text_config": {"model_type": "mistral"},
                "vision_config": {"model_type": "pixtral"},
            },
            "it is a multimodal model; its text model is of MistralForCausalLM, which runs once",
        ),
        (
            {
                "architectures": ["PaliGemmaForConditionalGeneration"],
                "text_config": {"model_type": "gemma3_text"},
            },
            "multimodal model; its text model is of Gemma3ForCausalLM",
        ),
        (
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "text_config": {"architectures": ["LlamaForCausalLM"]},
            },
            "multimodal model; its text model is of LlamaForCausalLM",
        ),
        (
            {
                "architectures": ["Qwen2_5OmniModel"],
                "thinker_config": {"text_config": {"model_type": "qwen2"}, "audio_config": {}},
            },
            "multimodal model; its text model is of Qwen2ForCausalLM",
        ),
        (
            of("NewVL", vision_config={"depth": 2}, text_config={"model_type": "new"}),
            "it is a multimodal model. `rjax models` lists",
        ),
        (of("Internvl", vision_tower="clip"), "it is a multimodal model."),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True} | OTHER,
            "it is an encoder-decoder model",
        ),
        (
            LLAMA | {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
            "its model_type is that of LlamaForCausalLM, but it has another head",
        ),
        (
            {
                "architectures": ["Gemma3ForSequenceClassification"],
                "model_type": "gemma3",
                "text_config": {"model_type": "gemma3_text"},
            },
            "its model_type is that of Gemma3ForConditionalGeneration, but it has another head",
        ),
        ({"model_type": "qwen3"}, "its model_type is that of Qwen3ForCausalLM; set architectures"),
        ({"model_type": "ministral"}, "its model_type is that of MinistralForCausalLM; set"),
        ({}, r"architectures is \[\], which is not supported: it is of a family that is unknown"),
        ({"architectures": ["X"], "model_type": 3, "text_config": [1]}, "unknown here"),
    ],
)
def test_what_it_is(values, message):
    with pytest.raises(models.CheckpointError, match=message) as caught:
        models.config_from_dict(values)
    assert "\n" not in str(caught.value)
    assert "`rjax models` lists those that are" in str(caught.value)
