"""Fixtures: a tokenizer of each kind."""

import gc
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jaxtyping
import pytest

from rjax.api.llm import LLM
from rjax.tokenization import Tokenizer
from tests.kept_programs import kept_programs

from .test_real_engine import CONFIG
from .tiny_tokenizers import KINDS, build, save


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """A tokenizer of each kind."""
    return build(request.param)


@pytest.fixture
def byte_level() -> Tokenizer:
    """GPT-2's kind, no beginning token."""
    return build("byte_level")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model folder: tokenizer, configuration, no weights."""
    path = tmp_path_factory.mktemp("tiny")
    save(KINDS["byte_level_bos"](), path)
    (path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    return path


TINY_OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "page_size": 8,
    "num_pages": 256,
    "max_num_seqs": 2,  # few sizes of steps, each of which is compiled
    "max_num_batched_tokens": 16,
    "enable_relay_attention": "on",
    "use_tqdm": False,
}


@pytest.fixture(scope="module")
def tiny_llm(tiny_folder: pathlib.Path) -> Iterator[LLM]:
    """A small model of random weights, for tests that leave it as it was."""
    with kept_programs():
        llm = LLM(str(tiny_folder), **TINY_OPTIONS)
    with llm:
        yield llm
        assert not llm.engine.has_unfinished_requests()


@pytest.fixture
def collector_off() -> Iterator[None]:
    """Only reference counting frees anything. What checks annotations makes cycles of its own."""
    gc.collect()
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        yield
    gc.enable()
