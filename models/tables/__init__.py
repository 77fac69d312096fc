"""The bundled model: a small Llama that answers questions about a Markdown table of people.

Everything that makes it is here: the generator of tables and questions, its tokenizer, the
training script and the finished checkpoint. See README.md in this folder.
"""

from models.tables.questions import Question, random_questions
from models.tables.table import Table, random_table, system_prompt

__all__ = ["Question", "Table", "random_questions", "random_table", "system_prompt"]
