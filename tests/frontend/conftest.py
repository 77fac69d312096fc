"""Fixtures: a tokenizer of each kind."""

import pytest

from rjax.tokenization import Tokenizer

from .tiny_tokenizers import KINDS, build


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """A tokenizer of each kind."""
    return build(request.param)


@pytest.fixture
def byte_level() -> Tokenizer:
    """GPT-2's kind, no beginning token."""
    return build("byte_level")
