"""Flags of vLLM: those with a meaning here, those without effect, and what replaces the others."""

import argparse

import pytest

from rjax.cli.arguments import given_engine_options, token_count
from rjax.commands import chat, generate, info
from rjax.commands.serve import options as serve
from rjax.config import EngineConfig
from rjax.config.memory_sizes import GIB
from rjax.errors import InvalidConfigError
from rjax.serve.config.limits import ServeLimits
from rjax.vllm.options import ENGINE_NO_OPS, INSTEAD, SERVER_NO_OPS

PARSERS = {
    "generate": generate.build_parser(),
    "chat": chat.build_parser(),
    "serve": serve.build_parser(),
    "info": info.build_parser(),
}


def config_of(*argv: str, command: str = "serve") -> EngineConfig:
    return EngineConfig.from_options(given_engine_options(PARSERS[command].parse_args(argv)))


@pytest.mark.parametrize("command", PARSERS)
def test_names_and_units_are_those_of_vllm(command):
    config = config_of(
        *("-tp", "2", "--max-num-seqs", "8", "--max-model-len", "32k", "--block-size", "32"),
        *("--num-gpu-blocks-override", "7", "--gpu-memory-utilization", "0.5", "--swap-space", "2"),
        *("--dtype", "half", "--load-format", "safetensors", "--max-num-batched-tokens", "2K"),
        *("--kv-cache-dtype", "fp8", "--no-enable-prefix-caching", "--max-logprobs", "5"),
        *("--logprobs-mode", "processed_logprobs"),
        command=command,
    )
    assert config.tensor_parallel_size == 2
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (8, 2048)
    assert (config.model.max_model_len, config.model.dtype) == (32_000, "float16")
    assert config.model.load_format == "auto"
    assert config.scheduler.logprobs_mode == "processed_logprobs"
    assert (config.cache.page_size, config.cache.num_pages) == (32, 7)
    assert config.cache.gpu_memory_utilization == 0.5
    assert config.cache.swap_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("32768", 32768), ("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("1m", 10**6)],
)
def test_numbers_of_tokens(text, tokens):
    assert token_count(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "-1", "auto", "1e3", "0.5", "1.0005k", "infk", "٣"])
def test_no_number_of_tokens(text):
    with pytest.raises(argparse.ArgumentTypeError, match="give one such as 32768, 32k"):
        token_count(text)


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_the_model_is_the_first_argument_or_a_flag(command, capsys):
    for argv in (["m"], ["--model", "m"], ["--seed", "1", "m"], ["m", "--model", "m"]):
        assert config_of(*argv, command=command).model.model == "m"
    assert config_of(command=command).model.model is None
    with pytest.raises(SystemExit):
        config_of("a", "--model", "b", command=command)
    assert "two models are given, a and b" in capsys.readouterr().err


@pytest.mark.parametrize("command", PARSERS)
def test_flags_without_effect_say_so_once(command, capsys):
    parser = PARSERS[command]
    flags = {**ENGINE_NO_OPS, **(SERVER_NO_OPS if command == "serve" else {})}
    arguments = parser.parse_args([*flags, *flags])
    assert given_engine_options(arguments).keys() <= {"warmup"}
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"rjax {command}: {x} has no effect: {why}" for x, why in flags.items()]


@pytest.mark.parametrize("flag", [*INSTEAD, "--no-enable-chunked-prefill", "-O3", "-cc.mode=3"])
def test_other_flags_say_what_to_use(flag, capsys):
    parser = PARSERS["serve"]
    assert flag not in parser._option_string_actions
    with pytest.raises(SystemExit) as end:
        parser.parse_args([flag, "1"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rjax serve: error: {flag.split('=')[0]}: ")
    assert error.count("\n") == 1


def test_what_replaces_a_flag_is_there():
    """Every flag that a hint names is a flag of the server."""
    known = set(PARSERS["serve"]._option_string_actions)
    texts = [*INSTEAD.values(), *ENGINE_NO_OPS.values(), *SERVER_NO_OPS.values()]
    named = {word.strip("'();,.") for text in texts for word in text.split() if "--" in word}
    assert named <= known


def test_an_unknown_flag_is_told_the_meaning_of_the_nearest(capsys):
    with pytest.raises(SystemExit):
        PARSERS["generate"].parse_args(["--max-num-sequences", "3"])
    said = "did you mean --max-num-seqs? Maximum sequences that decode at the same time;"
    assert said in capsys.readouterr().err


def test_a_models_folder_is_a_name_of_it_unless_names_are_given(tmp_path):
    folder = str(tmp_path / "llama")
    (tmp_path / "llama").mkdir()
    for given, names, kept in (
        ([folder], ("llama",), folder),
        ([folder, "--served-model-name", "a"], ("a",), None),
        (["org/llama"], ("org/llama",), None),
        ([], ("tables",), None),
    ):
        config = serve.serve_config(PARSERS["serve"].parse_args(given), ServeLimits())
        assert (config.names, config.folder) == (names, kept)


def test_flags_of_the_server(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("third-key\n")
    arguments = PARSERS["serve"].parse_args(
        [
            *("m", "--api-key", "first-key", "second-key", "--api-key-file", str(keys)),
            *("--served-model-name", "a", "b", "--enable-log-requests", "--disable-log-stats"),
            *("--tool-call-parser", "openai", "--reasoning-parser", "openai_gptoss"),
        ]
    )
    config = serve.serve_config(arguments, ServeLimits())
    assert config.keys == ("first-key", "second-key", "third-key")
    assert config.names == ("a", "b")
    assert config.own_name == "m"
    assert arguments.access_log
    assert arguments.disable_log_stats
    assert config.tool_call_parser == "auto"
    arguments.reasoning_parser = None
    with pytest.raises(InvalidConfigError, match="goes with --reasoning-parser openai_gptoss"):
        serve.serve_config(arguments, ServeLimits())
