"""The tokenizer: byte-level BPE that keeps every cell's tokens independent of its neighbours.

Digits, punctuation, spaces and newlines are tokens of their own, and so is the cell separator
" | ": a name or a number is spelled with the same tokens in the table, in a question and in an
answer, wherever it stands, so that answering is copying. The vocabulary is small: a rare string
falls into pieces of one to three letters, each of which training has seen many times.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from bench.train_bundled_model.questions import random_questions
from bench.train_bundled_model.table import INTRODUCTIONS, random_table, system_prompt
from rjax.models import BUNDLED_MODEL

BOS, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, BOS, END, SYSTEM, USER, ASSISTANT)

NEWLINE = "Ċ"  # as byte-level BPE writes it
VOCABULARY = 2048
MAX_LENGTH = 4096
_PIECES = r" ?\| ?|\d|\s|[^\w\s]|_"

CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('role must be system, user or assistant, not ' ~ message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ eos_token -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def prefix_text(system: str | None) -> str:
    """The chat template's text up to the end of the system message, BOS included; None for a chat
    without one."""
    return BOS if system is None else f"{BOS}{SYSTEM}{system}{END}"


def question_text(question: str) -> str:
    """The chat template's text of a user's turn and the opening of the assistant's."""
    return f"{USER}{question}{END}{ASSISTANT}"


def answer_text(answer: str) -> str:
    """The chat template's text of an assistant's turn after its opening."""
    return f"{answer}{END}"


def corpus(seed: int, tables: int) -> Iterator[str]:
    """Text of random training tables, their questions and answers."""
    rng = random.Random(seed)
    for _ in range(tables):
        table = random_table(rng, rng.randint(5, 40))
        yield system_prompt(table, rng.choice(INTRODUCTIONS))
        for question in random_questions(rng, table, 24):
            yield question.text
            yield question.answer


def train_tokenizer(seed: int = 0, tables: int = 3000, vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE tokenizer learned from generated text; the same seed gives the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=30,  # a token seen less often would be learned badly
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, tables), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files and generation_config.json of a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "do_sample": False,
        "temperature": 0.0,
        "max_new_tokens": 256,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    """Train the tokenizer and write it to a folder."""
    parser = argparse.ArgumentParser(description=train_tokenizer.__doc__)
    parser.add_argument("--out", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tables", type=int, default=3000)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    args = parser.parse_args()
    save_tokenizer(train_tokenizer(args.seed, args.tables, args.vocabulary), args.out)


if __name__ == "__main__":
    main()
