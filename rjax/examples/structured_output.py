"""Structured output: every text matches a JSON schema, a choice or a regular expression.

It needs the extra ``structured``: ``pip install -e '.[structured]'``.

    python -m rjax.examples.structured_output
"""

import json

from rjax import LLM, SamplingParams, StructuredOutputsParams
from rjax.models.tables.demo import demo_system_prompt

SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "pattern": "^The age of Andrea Nwachukwu is [0-9]+\\.$"}
    },
    "required": ["answer"],
    "additionalProperties": False,
}
JOBS = ["glassblower", "palaeontologist", "perfumer"]


def main() -> None:
    """Run the example."""
    asked = [
        ("How old is Andrea Nwachukwu?", StructuredOutputsParams(json=SCHEMA)),
        (
            "What is Hollie Smigiel's job?",
            StructuredOutputsParams(
                choice=[f"The occupation of Hollie Smigiel is {job}." for job in JOBS]
            ),
        ),
        (
            "Who is the oldest person?",
            StructuredOutputsParams(regex=r"The highest age is [0-9]+, so .+ is [A-Za-z ]+\."),
        ),
    ]
    table = {"role": "system", "content": demo_system_prompt()}
    conversations = [[table, {"role": "user", "content": question}] for question, _ in asked]
    params = [
        SamplingParams(temperature=0, max_tokens=64, structured_outputs=wanted)
        for _, wanted in asked
    ]
    with LLM(max_num_seqs=8, max_model_len=2048) as llm:
        found, chosen, matched = (
            output.outputs[0].text for output in llm.chat(conversations, params)
        )
    print(f"JSON: {json.loads(found)}")
    print(f"choice: {chosen}")
    print(f"regex: {matched}")


if __name__ == "__main__":
    main()
