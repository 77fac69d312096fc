"""The pages, the fenced code blocks in them, and Markdown tables for them."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BENCH = ROOT / "bench"
PAGES = sorted(
    [
        *DOCS.rglob("*.md"),
        *(ROOT / "README.md", ROOT / "rjax" / "serve" / "README.md"),
        *(BENCH / "README.md", *BENCH.glob("*/README.md")),
    ]
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        page: path of its page from the root of the repository.
        line: of its first line of code.
        language: after the fence.
        text: the code.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def code_blocks(*languages: str) -> list[Block]:
    """The blocks of these languages on all pages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 2
            name = str(page.relative_to(ROOT))
            found.append(Block(name, line, match[1], match[2]))
    return [block for block in found if block.language in languages]


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
