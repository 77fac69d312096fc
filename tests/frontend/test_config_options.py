"""`EngineConfig.to_options` gives what `from_options` makes the same config from."""

import pathlib

import msgspec
import pytest

from rjax.config import EngineConfig
from rjax.errors import InvalidConfigError

GIVEN = {
    "model": "/models/a",
    "tokenizer": pathlib.Path("/models/b"),
    "page_size": 32,
    "max_num_seqs": 8,
    "enable_relay_attention": False,
    "prefix_files": ("a.safetensors",),
    "swap_space": "512MiB",
    "kv_events_config": {"enable_kv_cache_events": False, "topic": "t"},
    "warmup": "on",
    "use_tqdm": False,
    "compilation_cache_dir": None,
}


def test_they_cross_a_process(tmp_path):
    prompt = tmp_path / "system.txt"
    prompt.write_text("Be brief. ")
    for given in ({}, {**GIVEN, "sys_prompt_file": str(prompt)}):
        config = EngineConfig.from_options(given)
        options = msgspec.msgpack.decode(msgspec.msgpack.encode(config.to_options()))
        prompt.write_text("Be brief. ")
        again = EngineConfig.from_options(options)
        assert again.to_options() == {**config.to_options(), **_lists(options)}
        assert again.model.model == config.model.model
        assert again.scheduler == config.scheduler
        assert again.relay.sys_prompt == config.relay.sys_prompt
    assert again.relay.sys_prompt == "Be brief. "
    assert again.cache.swap_bytes == config.cache.swap_bytes
    with pytest.raises(InvalidConfigError, match="save_pretrained"):
        EngineConfig.from_options({"tokenizer": object()}).to_options()


def _lists(options):
    return {name: value for name, value in options.items() if isinstance(value, list)}
