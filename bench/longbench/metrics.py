"""Scores of a predicted text against a reference, each from 0 to 1."""

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NUMBER = re.compile(r"\d+")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Lower case without punctuation, articles and double spaces, as in SQuAD's evaluation."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 where the normalised texts are equal."""
    return float(normalised(prediction) == normalised(answer))


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over normalised words (Rajpurkar et al., 2016)."""
    found, wanted = normalised(prediction).split(), normalised(answer).split()
    common = sum((Counter(found) & Counter(wanted)).values())
    return _harmonic(common, len(found), len(wanted))


def rouge_l(prediction: str, answer: str) -> float:
    """F-measure of the longest common subsequence of words (Lin, 2004)."""
    found, wanted = prediction.lower().split(), answer.lower().split()
    return _harmonic(_common_subsequence(found, wanted), len(found), len(wanted))


def class_match(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 / n where the prediction names n classes and the right one is among them.

    A class whose name is only a part of the right one's does not count as named.
    """
    named = [c for c in classes if c in prediction and not (c != answer and c in answer)]
    return 1 / len(named) if answer in named else 0.0


def number_match(prediction: str, answer: str) -> float:
    """Share of the numbers in the prediction that equal the answer's last one."""
    wanted = _NUMBER.findall(answer)
    found = _NUMBER.findall(prediction)
    return found.count(wanted[-1]) / len(found) if found and wanted else 0.0


def code_similarity(prediction: str, answer: str) -> float:
    """Similarity, character by character, of the first line of code of the prediction."""
    comments = ("#", "//", "```")
    lines = [line for line in prediction.lstrip("\n").split("\n") if line.strip()]
    code = [line for line in lines if not line.strip().startswith(comments)]
    return difflib.SequenceMatcher(None, code[0] if code else "", answer, autojunk=False).ratio()


def _harmonic(common: int, found: int, wanted: int) -> float:
    return 2 * common / (found + wanted) if common else 0.0


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, in O(len(a) * len(b)) time and O(len(b)) space."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b, 1):
            above = row[j]
            row[j] = before + 1 if word == other else max(above, row[j - 1])
            before = above
    return row[-1]
