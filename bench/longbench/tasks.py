"""The tasks: how a prompt is laid out, how long an answer may be, and how it is scored."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from bench.longbench.metrics import (
    class_match,
    code_similarity,
    exact_match,
    normalised,
    number_match,
    rouge_l,
    token_f1,
)

Metric = Literal["f1", "rouge_l", "class", "number", "code", "exact"]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One data set.

    Attributes:
        shared: template of the shared prefix, with ``{context}``.
        question: template of the suffix, with ``{input}`` if the task has one.
        new_tokens: length of an answer.
        metric: the score that is reported.
        first_line: only the first line of an answer counts.
    """

    shared: str
    question: str
    new_tokens: int
    metric: Metric
    first_line: bool = False


_DOCUMENT = "Read this document.\n\n{context}\n\n"
_SHORT = "Question: {input}\nAnswer in as few words as possible, without explaining.\nAnswer:"
_PASSAGES = "Read these passages.\n\n{context}\n\n"

TASKS: dict[str, Task] = {
    "narrativeqa": Task("Read this story.\n\n{context}\n\n", _SHORT, 128, "f1"),
    "qasper": Task(
        "Read this article.\n\n{context}\n\n",
        "Question: {input}\nAnswer briefly, with yes or no where that answers it, and with "
        "'unanswerable' where the article does not say.\nAnswer:",
        128,
        "f1",
    ),
    "multifieldqa_en": Task(_DOCUMENT, _SHORT, 64, "f1"),
    "hotpotqa": Task(_PASSAGES, _SHORT, 32, "f1"),
    "2wikimqa": Task(_PASSAGES, _SHORT, 32, "f1"),
    "musique": Task(_PASSAGES, _SHORT, 32, "f1"),
    "gov_report": Task(
        "Read this government report.\n\n{context}\n\n",
        "Summarise the report on one page.\nSummary:",
        512,
        "rouge_l",
    ),
    "qmsum": Task(
        "Read this transcript of a meeting.\n\n{context}\n\n",
        "Request: {input}\nAnswer in one or more sentences.\nAnswer:",
        512,
        "rouge_l",
    ),
    "multi_news": Task(
        "Read these news articles.\n\n{context}\n\n",
        "Summarise all of them on one page.\nSummary:",
        512,
        "rouge_l",
    ),
    "trec": Task(
        "Tell the type of each question. Examples:\n\n{context}\n", "{input}", 64, "class", True
    ),
    "triviaqa": Task(
        "Answer each question from its passage, with the answer alone. Examples:\n\n{context}\n\n",
        "{input}",
        32,
        "f1",
        True,
    ),
    "samsum": Task(
        "Summarise each dialogue in a few short sentences. Examples:\n\n{context}\n\n",
        "{input}",
        128,
        "rouge_l",
        True,
    ),
    "passage_count": Task(
        "Some of these numbered paragraphs may be repeated.\n\n{context}\n\n",
        "How many different paragraphs are there? Answer with the number alone.\nNumber:",
        32,
        "number",
    ),
    "passage_retrieval_en": Task(
        "Here are 30 numbered paragraphs.\n\n{context}\n\n",
        "One of them has this summary:\n{input}\n\nAnswer with its name, such as 'Paragraph 7'."
        "\nAnswer:",
        32,
        "number",
    ),
    "lcc": Task("Continue this code by one line.\n{context}", "", 64, "code"),
    "repobench-p": Task("Continue this code by one line.\n{context}", "{input}", 64, "code"),
    # Not of LongBench: the sample, in the form that the bundled model knows.
    "table_qa": Task("{context}", "{input}", 96, "exact"),
}


def task_of(name: str) -> Task:
    """The task of a data set; "_e", as LongBench-E names its files, changes nothing.

    Raises:
        ValueError: a data set without a template here.
    """
    found = TASKS.get(name.removesuffix("_e"))
    if found is None:
        raise ValueError(
            f"no template for the data set {name!r}; there are {', '.join(sorted(TASKS))} (the "
            "Chinese ones need a word splitter that is no part of this project)"
        )
    return found


def score(task: Task, prediction: str, answers: Sequence[str], classes: Any) -> dict[str, float]:
    """The task's own score and, beside it, F1, ROUGE-L and exact match; best over the answers."""
    text = prediction.strip().split("\n")[0] if task.first_line else prediction
    every = {
        "f1": max(token_f1(text, a) for a in answers),
        "rouge_l": max(rouge_l(text, a) for a in answers),
        "exact": max(exact_match(text, a) for a in answers),
    }
    match task.metric:
        case "class":
            own = max(class_match(text, a, classes or answers) for a in answers)
        case "number":
            own = max(number_match(text, a) for a in answers)
        case "code":
            own = max(code_similarity(text, a) for a in answers)
        case _:
            own = every[task.metric]
    return {"score": own, **every, "empty": float(not normalised(text))}
