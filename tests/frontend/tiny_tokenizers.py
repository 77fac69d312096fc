"""Small tokenizers of every kind that tokenises a seam differently, built on the fly."""

import functools
import json
import pathlib
import tempfile

from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from rjax.tokenization import Tokenizer

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Name: Ann Lee, age: 41, country: Peru, email: ann@example.org",
    "a ab abc abcd  double  spaces\nand\n\nnew lines\ttabs",
    "caffè naïve 你好世界 привет 🙂🙃 e\u0301",
)
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<unk>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _specials() -> list[AddedToken]:
    return [AddedToken(s, special=True, normalized=False) for s in SPECIALS]


def _byte_level(bos: bool) -> RustTokenizer:
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=_specials(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator(TEXTS * 3, trainer)
    if bos:
        rust.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", rust.token_to_id("<s>"))]
        )
    return rust


def _metaspace(scheme: str) -> RustTokenizer:
    rust = RustTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    byte_tokens = [AddedToken(f"<0x{b:02X}>", normalized=False) for b in range(256)]
    as_normalizer = scheme == "normalizer"
    rust.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="always" if as_normalizer else scheme, split=scheme != "always"
    )
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    # Byte tokens must be in the model, not added: train with them, then keep the specials only.
    trainer = trainers.BpeTrainer(
        vocab_size=560, special_tokens=_specials(), limit_alphabet=60, show_progress=False
    )
    rust.train_from_iterator(TEXTS * 3, trainer)
    state = json.loads(rust.to_str())
    vocab = state["model"]["vocab"]
    for token in byte_tokens:
        vocab.setdefault(token.content, len(vocab))
    if as_normalizer:
        state["pre_tokenizer"] = None
    rust = RustTokenizer.from_str(json.dumps(state))
    if as_normalizer:  # as in the file of Llama 2
        rust.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", rust.token_to_id("<s>"))]
    )
    return rust


def _gemma() -> RustTokenizer:
    """Spaces become pieces, and nothing is written in front of a text."""
    rust = _metaspace("normalizer")
    rust.normalizer = normalizers.Replace(" ", "▁")
    rust.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return rust


def _unigram() -> RustTokenizer:
    rust = RustTokenizer(models.Unigram())
    rust.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("▁")])
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    rust.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=_specials(), unk_token="<unk>", show_progress=False
    )
    rust.train_from_iterator(TEXTS * 3, trainer)
    return rust


def _wordpiece() -> RustTokenizer:
    rust = RustTokenizer(models.WordPiece(unk_token="<unk>"))
    rust.normalizer = normalizers.BertNormalizer()
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=_specials(), show_progress=False
    )
    rust.train_from_iterator(TEXTS * 3, trainer)
    ids = [(s, rust.token_to_id(s)) for s in ("<s>", "</s>")]
    rust.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return rust


def _straddled() -> RustTokenizer:
    """Byte-level, with an added token that begins where a special token ends."""
    rust = _byte_level(bos=True)
    rust.add_special_tokens(["<|im_end|>x", ">y"])
    rust.add_tokens([AddedToken("\nQ", normalized=True)])
    return rust


KINDS = {
    "byte_level": functools.partial(_byte_level, False),
    "byte_level_bos": functools.partial(_byte_level, True),
    "metaspace_first": functools.partial(_metaspace, "first"),
    "metaspace_always": functools.partial(_metaspace, "always"),
    "metaspace_normalizer": functools.partial(_metaspace, "normalizer"),
    "gemma": _gemma,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "straddled": _straddled,
}


def save(rust: RustTokenizer, folder: pathlib.Path) -> pathlib.Path:
    """Write a tokenizer as a Hugging Face folder."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(folder))
    return folder


@functools.cache
def build(kind: str) -> Tokenizer:
    """The tokenizer of a kind; made once."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(save(KINDS[kind](), pathlib.Path(folder)))
    return tokenizer
