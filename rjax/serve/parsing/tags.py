"""Tags that are single tokens, told apart from ordinary tokens that spell them."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from rjax.tokenization import Detokenizer

_FIRST_SIGN = 0xDC00  # unpaired surrogates, which decoded text never has


def tag_signs(tags: Iterable[str]) -> dict[str, str]:
    """The sign of each tag, by its place among the tags of its format."""
    return {tag: chr(_FIRST_SIGN + i) for i, tag in enumerate(tags)}


class Tags:
    """The tags of an output format, as its parsers see them.

    In the text that parsers read, a tag that is one token is a single character, its sign. Ordinary
    tokens that spell the tag have no sign and stay text, as they are text for the grammars. A tag
    that is no token is found in the text.

    Args:
        tags: the format's tags.
        ids: token ids of those that are tokens.
    """

    def __init__(self, tags: Sequence[str], ids: Mapping[str, int]) -> None:
        self._signs = {tag: sign for tag, sign in tag_signs(tags).items() if tag in ids}
        self._texts = str.maketrans({sign: tag for tag, sign in self._signs.items()})
        self._by_id = {ids[tag]: (tag, sign) for tag, sign in self._signs.items()}

    def __bool__(self) -> bool:
        return bool(self._signs)

    def find(self, token_id: int) -> tuple[str, str] | None:
        """Text and sign of a token that is a tag."""
        return self._by_id.get(token_id)

    def sign(self, text: str) -> str:
        """A text with signs for its tags: a tag itself, or a text whose tags are tokens."""
        for tag, sign in self._signs.items():
            text = text.replace(tag, sign)
        return text

    def unsign(self, text: str) -> str:
        """A text with its tags written out."""
        return text.translate(self._texts)


class SignedText:
    """Signs the text of one output, which comes in pieces and may be behind the tokens.

    Args:
        tags: the format's tags.
        detokenizer: the output's detokenizer.

    Attributes:
        ends: end of each added token, in characters of the signed text.
    """

    def __init__(self, tags: Tags, detokenizer: Detokenizer) -> None:
        self._tags = tags
        self._detokenizer = detokenizer
        self.ends: list[int] = []
        self._pushed = 0  # characters of all tokens
        self._found: deque[tuple[int, int, str]] = deque()  # start and end of tags ahead, signs
        self._at = 0  # characters that were signed
        self._held = ""  # first part of a tag

    def add(self, token_ids: Iterable[int]) -> None:
        """Add tokens, before the text that they complete."""
        end = self.ends[-1] if self.ends else 0
        for token_id in token_ids:
            new = self._detokenizer.push(token_id)
            end += len(new)
            tag = self._tags.find(token_id)
            if tag is not None and (place := new.rfind(tag[0])) >= 0:
                text, sign = tag
                start = self._pushed + place
                self._found.append((start, start + len(text), sign))
                end += len(sign) - len(text)
            self._pushed += len(new)
            self.ends.append(end)

    def sign(self, text: str, *, ended: bool) -> str:
        """The next piece of the text with signs, the last if ``ended``."""
        if not self._found:
            self._at += len(text)
            return text
        text, self._held = self._held + text, ""
        pieces = []
        while self._found and self._found[0][0] < self._at + len(text):
            start, end, sign = self._found[0]
            pieces.append(text[: start - self._at])
            text, self._at = text[start - self._at :], start
            if len(text) < end - start:  # a stop string may cut the output inside a tag
                if not ended:
                    self._held = text
                    text = ""
                break
            self._found.popleft()
            pieces.append(sign)
            text, self._at = text[end - start :], end
        self._at += len(text)
        return "".join((*pieces, text))
