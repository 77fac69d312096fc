"""Writes the sample data: questions about generated tables, in LongBench's form.

python -m bench.longbench.make_sample
"""

import json
from pathlib import Path

from bench.longbench.__main__ import SAMPLE
from bench.train_bundled_model.scoring import held_out_sheets

TABLES, QUESTIONS, ROWS, SEED = 2, 6, (5, 6), 20240


def sample_lines() -> list[str]:
    """One line a question; the tables have people whose names training never saw."""
    sheets = held_out_sheets(TABLES, QUESTIONS, rows=ROWS, seed=SEED)
    return [
        json.dumps(
            {
                "dataset": "table_qa",
                "context": sheet.system,
                "input": question.text,
                "answers": [question.answer],
                "length": len((sheet.system or "").split()),
                "language": "en",
                "all_classes": None,
            },
            ensure_ascii=False,
        )
        for sheet in sheets
        for question in sheet.questions
    ]


def main(folder: Path = SAMPLE) -> None:
    """Write the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table_qa.jsonl").write_text("\n".join(sample_lines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
