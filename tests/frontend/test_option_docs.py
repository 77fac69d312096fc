"""Every option of the engine is documented once, and found in ``--help`` and in LLM's docstring."""

import argparse
import dataclasses

import pytest

from rjax import LLM
from rjax.cli.arguments import (
    ENGINE_FLAGS,
    PYTHON_ONLY,
    add_engine_arguments,
    flag_of,
    given_engine_options,
)
from rjax.commands import chat as chat_command
from rjax.commands import generate
from rjax.commands.serve import options as serve_command
from rjax.config import GROUPS, EngineConfig
from rjax.config.option_docs import attribute_docs, engine_option_docs, engine_options

PARSERS = {
    "generate": generate.build_parser,
    "chat": chat_command.build_parser,
    "serve": serve_command.build_parser,
}


def test_every_option_has_its_text():
    texts = engine_option_docs()
    assert texts.keys() == engine_options().keys()
    for name, text in texts.items():
        assert text.endswith("."), name
        assert len(text) > 20, name


@pytest.mark.parametrize("cls", [*GROUPS.values(), EngineConfig], ids=lambda cls: cls.__name__)
def test_no_text_is_of_something_else(cls):
    assert attribute_docs(cls).keys() == {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("command", PARSERS)
def test_every_option_is_in_help(command):
    shown = PARSERS[command]().format_help()
    words = " ".join(shown.split())
    for name in engine_options():
        assert (name if name in PYTHON_ONLY else f"{flag_of(name)} ") in words.replace(",", " "), (
            name
        )


def test_help_shows_the_documentation():
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    words = " ".join(parser.format_help().split())
    assert "maximum sequences that decode at the same time." in words
    assert "(default: auto)" in words
    assert "``" not in words


def test_every_option_is_in_the_docstring_of_llm():
    assert LLM.__doc__ is not None
    words = " ".join(LLM.__doc__.split())
    for name, text in engine_option_docs().items():
        assert f"{name}: {text}" in words
    assert "{options}" not in words


def test_flags_give_what_python_takes():
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    given = [
        "--relay",
        "off",
        "--num-pages",
        "7",
        "--gpu-memory-utilization",
        "0.5",
        "--warmup",
        "on",
    ]
    given += ["--dtype", "bfloat16", "--swap-space", "512MiB", "--no-enable-prefix-caching"]
    options = given_engine_options(parser.parse_args(given))
    config = EngineConfig.from_options(options)
    assert config.relay.mode == "off"
    assert (config.cache.num_pages, config.cache.swap_bytes) == (7, 2**29)
    assert config.cache.gpu_memory_utilization == 0.5
    assert (config.warmup, config.cache.enable_prefix_caching) == ("on", False)
    assert config.model.dtype == "bfloat16"
    assert given_engine_options(parser.parse_args([])) == {}
    assert set(ENGINE_FLAGS) | set(PYTHON_ONLY) == set(engine_options())
