"""Options of vLLM's Python classes: accepted with a warning, refused with a reason, or renamed."""

import warnings
from typing import Any

import pytest

from rjax.config import GROUPS, EngineConfig
from rjax.errors import InvalidConfigError, near_miss
from rjax.vllm.options import INSTEAD, OPTION_NO_OPS


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_options(options)


@pytest.mark.parametrize("name", OPTION_NO_OPS)
def test_what_has_no_effect_is_accepted_with_one_warning(name: str) -> None:
    values = {
        "task": "generate",
        "runner": "generate",
        "scheduling_policy": "fcfs",
        "structured_outputs_config": {"backend": "auto"},
    }
    value = values.get(name, "auto")
    with pytest.warns(UserWarning, match=f"^{name} has no effect: ") as found:
        assert config(**{name: value}) == config()
    assert len(found) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": False, "trust_remote_code": False},
        {"enable_lora": False, "speculative_config": None, "hf_overrides": {}, "max_loras": None},
        {"pipeline_parallel_size": 1, "data_parallel_size": 1, "cpu_offload_gb": 0},
        {"limit_mm_per_prompt": {}, "logits_processors": [], "kv_transfer_config": None},
    ],
)
def test_what_is_off_is_accepted(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config(**options) == config()


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"enable_lora": True}, "enable_lora is True: adapters are not supported; merge them"),
        ({"speculative_config": {"model": "x"}}, "num_decode_steps helps small batches"),
        ({"pipeline_parallel_size": 2}, "use tensor_parallel_size; layers stay on all devices"),
        ({"data_parallel_size": 2}, "use 'rjax serve --replicas N': that many engines"),
        ({"cpu_offload_gb": 4}, "swap_space is host memory for KV"),
        ({"disable_cascade_attn": True}, "use enable_relay_attention off"),
        ({"kv_cache_memory_bytes": 9}, r"use num_pages \(pages of page_size tokens\)"),
        ({"limit_mm_per_prompt": {"image": 1}}, "models take text only"),
        ({"mm_processor_cache_gb": 4}, "models take text only"),
        (
            {"weight_transfer_config": {"backend": "nccl"}},
            "'rjax serve --enable-weight-updates' and",
        ),
        ({"runner": "pooling"}, "none pools; give one of 'auto', 'generate', or leave it out"),
        ({"task": "embed"}, "give one of 'auto', 'generate', or leave it out"),
        ({"tokenizer_mode": "mistral"}, "give one of 'auto', 'hf', 'slow'"),
    ],
)
def test_the_others_are_refused_with_the_reason(option: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfigError, match=reason):
        config(**option)


def test_every_flag_of_an_engine_is_known_as_an_option() -> None:
    own = {field for group in GROUPS.values() for field in group.__dataclass_fields__}
    for flag in INSTEAD:
        if flag.startswith("--"):
            name = flag.removeprefix("--").replace("-", "_")
            if name not in own and name not in OPTION_NO_OPS:
                with pytest.raises(InvalidConfigError, match=f"^{name} is 7: "):
                    config(**{name: 7})


def test_other_names_of_an_option() -> None:
    assert config(block_size=32, num_gpu_blocks_override=9) == config(page_size=32, num_pages=9)
    with pytest.raises(InvalidConfigError, match="page_size is given twice, also as 'block_size'"):
        config(page_size=32, block_size=32)


def test_a_name_is_called_the_nearest_only_if_it_is_near() -> None:
    assert near_miss("max_num_seq", ["max_num_seqs", "dtype"]) == "the nearest is 'max_num_seqs'"
    assert near_miss("colour", ["max_num_seqs", "dtype"]) == "known are dtype, max_num_seqs"
    with pytest.raises(InvalidConfigError, match="'max_num_seq'; the nearest is 'max_num_seqs'"):
        config(max_num_seq=3)
    with pytest.raises(InvalidConfigError, match="unknown option 'colour'; known are backend"):
        config(colour="blue")
