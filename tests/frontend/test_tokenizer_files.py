"""The ids of a folder are those of its tokenizer.json, whatever class its configuration names."""

import json
import pathlib
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from rjax.tokenization import Tokenizer

from .tiny_tokenizers import KINDS, TEXTS

CLASSES = (
    *("GPT2Tokenizer", "Qwen2Tokenizer", "CohereTokenizer", "LlamaTokenizer", "GemmaTokenizer"),
    *("LlamaTokenizerFast", "GPTNeoXTokenizer", "TokenizersBackend", "PreTrainedTokenizerFast"),
    *("TokenizerOfNobody", None),
)
MODEL_TYPES = ("llama", "qwen2", "gpt2", "gemma2", "deepseek_v2", "mistral", "cohere", "phi3", None)
SAMPLES = (
    *("b", " b", "  b", "b ", "hello world", "hello  world", "\tb\n b", "12345 67", "don't", ""),
    *("cafe\u0301 café", "🙂你好", "a<s>b", "</s> a", "<s>", "x\u2581y", "A b\r\n  c"),
    *TEXTS,
)


def _own_pre_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level with a pre-tokenizer of its own: no digits together, words of one case."""
    rust = KINDS["byte_level_bos"]()
    rust.normalizer = normalizers.Lowercase()
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[a-z]{1,3}| "), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return rust


FILES = {**KINDS, "own_pre_tokenizer": _own_pre_tokenizer}


def _write(folder: pathlib.Path, kind: str, **files: dict[str, Any]) -> tokenizers.Tokenizer:
    """Write a folder with a tokenizer.json and other JSON files; return what the first holds."""
    path = str(folder / "tokenizer.json")
    FILES[kind]().save(path)
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return tokenizers.Tokenizer.from_file(path)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CLASSES)
def test_ids_are_those_of_the_file(name: str | None, tmp_path: pathlib.Path) -> None:
    given = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = given if name is None else {**given, "tokenizer_class": name}
    for i, kind in enumerate(FILES, CLASSES.index(name)):
        config = {"model_type": MODEL_TYPES[i % len(MODEL_TYPES)]}
        want = _write(tmp_path, kind, tokenizer_config=settings, config=config)
        found = Tokenizer(tmp_path)
        for text in SAMPLES:
            where = kind, config, text
            ids = want.encode(text, add_special_tokens=False).ids
            assert found.encode(text, add_special_tokens=False) == ids, where
            assert found.decode(ids) == want.decode(ids), where
            if not text.startswith("<s>"):
                assert found.encode(text) == want.encode(text).ids, where
            streamed = found.detokenizer()
            shown = "".join(map(streamed.push, ids)) + streamed.flush()
            assert shown.rstrip("\ufffd") == want.decode(ids).rstrip("\ufffd"), where
        assert found.eos_token_ids == {want.token_to_id("</s>")}
        assert found.bos_token_id == want.token_to_id("<s>")


def test_a_leading_space_is_a_piece(tmp_path: pathlib.Path) -> None:
    for model_type in ("llama", "gemma2", "deepseek_v2"):
        settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
        config = {"model_type": model_type}
        _write(tmp_path, "metaspace_normalizer", tokenizer_config=settings, config=config)
        found = Tokenizer(tmp_path)
        ids = found.encode(" a", add_special_tokens=False)
        assert found.hf.convert_ids_to_tokens(ids) == ["\u2581", "\u2581a"]
        assert found.decode(ids) == " a"
        assert found.encode("a", add_special_tokens=False) == ids[1:]
        before = found.encode("the")
        push = found.detokenizer(before).push
        assert "".join(map(push, ids)) == "  a"


SETTINGS: dict[str, dict[str, Any]] = {
    "named tokens": {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "</s>"},
    "tokens with flags": {
        "eos_token": {
            "__type": "AddedToken",
            "content": "</s>",
            "lstrip": True,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        },
        "bos_token": None,
    },
    "tokens that the file lacks": {
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "additional_special_tokens": ["<|extra|>"],
        "added_tokens_decoder": {
            "0": {"content": "<s>", "special": True, "normalized": False},
            "1": {"content": "</s>", "special": True, "normalized": False},
            "500": {"content": "<|tool|>", "special": False, "normalized": False},
        },
    },
    "templates": {
        "eos_token": "</s>",
        "chat_template": [
            {"name": "default", "template": "{{ eos_token }}"},
            {"name": "tool_use", "template": "{{ bos_token }}"},
        ],
    },
    "nothing": {},
}


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("separate", [False, True])
def test_special_tokens_and_templates_are_those_of_transformers(
    case: str, separate: bool, tmp_path: pathlib.Path
) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **SETTINGS[case]}
    _write(tmp_path, "byte_level_bos", tokenizer_config=settings)
    if separate:
        (tmp_path / "chat_template.jinja").write_text("{{ eos_token }} of a file")
        legacy = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(legacy))
    want = AutoTokenizer.from_pretrained(str(tmp_path))
    found = Tokenizer(tmp_path).hf
    assert found.special_tokens_map == want.special_tokens_map
    assert found.all_special_ids == want.all_special_ids
    assert found.added_tokens_decoder == want.added_tokens_decoder
    assert found.get_vocab() == want.get_vocab()
    assert found.chat_template == want.chat_template
    assert (found.bos_token_id, found.eos_token_id) == (want.bos_token_id, want.eos_token_id)


def test_a_class_brings_its_special_tokens(tmp_path: pathlib.Path) -> None:
    """GPT-2's own tokenizer_config.json names neither a class nor a token."""
    files = {"tokenizer_config": {"model_max_length": 1024}, "config": {"model_type": "gpt2"}}
    want = _write(tmp_path, "byte_level", **files)
    assert Tokenizer(tmp_path).eos_token_ids == frozenset()  # the file lacks <|endoftext|>
    size = want.get_vocab_size()
    assert Tokenizer(tmp_path).vocab_size == size
    want.add_special_tokens(["<|endoftext|>"])
    want.save(str(tmp_path / "tokenizer.json"))
    found = Tokenizer(tmp_path)
    assert found.eos_token_ids == {size}
    assert found.bos_token == "<|endoftext|>"
    assert AutoTokenizer.from_pretrained(str(tmp_path)).eos_token_id == size
    settings = {"bos_token": None, "eos_token": "</s>", "tokenizer_class": "GPT2TokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = Tokenizer(tmp_path)
    assert (found.bos_token, found.hf.eos_token) == (None, "</s>")


def test_folders_without_the_file_are_loaded_by_transformers(tmp_path: pathlib.Path) -> None:
    rust = FILES["byte_level"]()
    rust.model.save(str(tmp_path))
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "unk_token": "<unk>"}))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("merges.txt", "tokenizer_config.json", "vocab.json"),
    ]
    found = Tokenizer(tmp_path)
    assert found.eos_token_ids == {rust.token_to_id("</s>")}
    for text in ("hello world", " a b", "caf\u00e8 \u4f60"):
        assert found.decode(found.encode(text)) == text
