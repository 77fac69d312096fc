"""Tokenizer, tokenisation after shared prefixes, and incremental detokenisation."""

from rjax.tokenization.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer
from rjax.tokenization.output_text import OutputText
from rjax.tokenization.prefix import PrefixTokenizer, common_prefix, encode_shared_prefix
from rjax.tokenization.sentencepiece_detokenizer import SentencePieceDetokenizer
from rjax.tokenization.sys_prompt_tokenizer import SysPromptTokenizer
from rjax.tokenization.tokenizer import Tokenizer

__all__ = [
    "ByteLevelDetokenizer",
    "Detokenizer",
    "OutputText",
    "PrefixTokenizer",
    "SentencePieceDetokenizer",
    "SysPromptTokenizer",
    "Tokenizer",
    "WindowDetokenizer",
    "common_prefix",
    "encode_shared_prefix",
]
