"""Text to tokens and back: the tokenizer, the seam after a shared prefix, incremental text."""

from rjax.tokenization.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer
from rjax.tokenization.output_text import OutputText
from rjax.tokenization.seam import SeamTokenizer
from rjax.tokenization.tokenizer import Tokenizer

__all__ = [
    "ByteLevelDetokenizer",
    "Detokenizer",
    "OutputText",
    "SeamTokenizer",
    "Tokenizer",
    "WindowDetokenizer",
]
