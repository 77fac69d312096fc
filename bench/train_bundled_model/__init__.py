"""The data generator, the tokenizer and the training of the bundled model; see README.md."""

from bench.train_bundled_model.questions import Question, random_questions
from bench.train_bundled_model.table import Table, random_table, system_prompt

__all__ = ["Question", "Table", "random_questions", "random_table", "system_prompt"]
