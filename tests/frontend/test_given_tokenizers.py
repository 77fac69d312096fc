"""Tokenizers that a user hands in: of Hugging Face's two libraries, as files, and none at all."""

import pathlib
from typing import Any

import pytest
import tokenizers
import transformers

from rjax.api.llm import LLM
from rjax.errors import InvalidConfigError
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.loading.service_builder import make_service
from rjax.tokenization import Tokenizer

from .conftest import TINY_OPTIONS
from .fake_engine import FakeEngine
from .tiny_tokenizers import CHAT_TEMPLATE, KINDS, save

pytestmark = pytest.mark.usefixtures("kept")

TEXT = "The quick brown fox, caf\u00e8."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save(KINDS["byte_level_bos"](), tmp_path_factory.mktemp("tokenizer"))


def sources(folder: pathlib.Path) -> list[Any]:
    """The same tokenizer in every form."""
    path = folder / "tokenizer.json"
    return [
        folder,
        str(folder),
        path,
        str(path),
        transformers.AutoTokenizer.from_pretrained(str(folder)),
        tokenizers.Tokenizer.from_file(str(path)),
    ]


def test_every_form_gives_the_same_tokens(folder: pathlib.Path) -> None:
    want = Tokenizer(folder).encode(TEXT)
    for source in sources(folder):
        found = Tokenizer(source)
        assert found.encode(TEXT) == want, source
        assert found.decode(want) == TEXT
        push = found.detokenizer().push
        assert "".join(map(push, want)) == TEXT
        assert found.is_fast


def test_a_template_is_not_put_into_the_object_of_a_user(folder: pathlib.Path) -> None:
    own = transformers.AutoTokenizer.from_pretrained(str(folder))
    found = Tokenizer(own, chat_template="{{ messages[0].content }}!")
    assert found.apply_chat_template([{"role": "user", "content": "a"}]) == "a!"
    assert own.chat_template == CHAT_TEMPLATE


class Custom:
    """Has some of what is needed."""

    eos_token_id = bos_token_id = 0
    bos_token = chat_template = ""
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __call__(self) -> None: ...

    def __len__(self) -> int:
        return 1

    encode = convert_ids_to_tokens = get_vocab = __call__


def test_what_is_missing_is_named_in_one_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "tokenizer_config.json").write_text("{}")
    for source, message in (
        (Custom(), "Custom has no apply_chat_template, decode, which"),
        (3, "int has no __call__"),
        (transformers.PreTrainedTokenizerFast, "is the class .*give an object"),
        (tmp_path / "nowhere", "neither a folder nor a file"),
        (tmp_path / "bad.json", "is no tokenizer.json"),
        (tmp_path / "half", "has no tokenizer.json"),
    ):
        with pytest.raises(InvalidConfigError, match=message) as raised:
            Tokenizer(source)
        assert "\n" not in str(raised.value)


def test_llm_takes_it_and_gives_it_back(tiny_folder: pathlib.Path, folder: pathlib.Path) -> None:
    given = transformers.AutoTokenizer.from_pretrained(str(folder))
    with LLM(str(tiny_folder), tokenizer=given, **TINY_OPTIONS) as llm:
        assert llm.get_tokenizer() is given
        with pytest.raises(InvalidConfigError, match="save_pretrained"):
            make_service(llm.engine, ServeConfig(model="tiny"))
    with pytest.raises(InvalidConfigError, match="Custom has no"):
        LLM(str(tiny_folder), tokenizer=Custom(), **TINY_OPTIONS)


def test_users_of_vllm_find_what_they_know(folder: pathlib.Path) -> None:
    found = LLM.from_engine(FakeEngine(Tokenizer(folder))).get_tokenizer()
    talk = [{"role": "user", "content": "a"}]
    text = found.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    tokens = found.encode(TEXT)
    assert found.decode(tokens, skip_special_tokens=True) == TEXT
    assert found.eos_token == "</s>"


@pytest.mark.parametrize("split", [False, True])
def test_settings_of_an_object_count_as_in_transformers(folder: pathlib.Path, split: bool) -> None:
    """Its truncation and its padding do not cut or fill a prompt."""
    own, other = (transformers.AutoTokenizer.from_pretrained(str(folder)) for _ in range(2))
    own.backend_tokenizer.enable_truncation(3)
    own.backend_tokenizer.enable_padding(length=64)
    own.split_special_tokens = other.split_special_tokens = split
    text = f"{TEXT}<|im_end|>"
    assert Tokenizer(own).encode_batch([text, "a"]) == other([text, "a"])["input_ids"]
