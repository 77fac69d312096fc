"""Streams in an asyncio program: tasks share one engine, and their requests run in one batch.

python -m rjax.examples.asyncio_streams
"""

import asyncio

from rjax import AsyncLLM, RequestOutputKind, SamplingParams
from rjax.models.tables.demo import demo_system_prompt

PARAMS = SamplingParams(temperature=0, max_tokens=64, output_kind=RequestOutputKind.DELTA)


async def ask(llm: AsyncLLM, question: str) -> tuple[str, int]:
    """The answer to a question about the demo table, and the number of pieces it came in."""
    messages = [
        {"role": "system", "content": demo_system_prompt()},
        {"role": "user", "content": question},
    ]
    pieces = []
    async for output in llm.chat(messages, PARAMS):
        pieces.append(output.outputs[0].text)
    return "".join(pieces), len(pieces)


async def run() -> None:
    """Ask several questions at the same time, then stop an answer early."""
    questions = [
        "Who is the oldest person?",
        "What does the table say about Gaynelle bin Mkhize?",
        "How many people are from Puerto Rico?",
    ]
    async with AsyncLLM(max_num_seqs=8, max_model_len=2048) as llm:
        answers = await asyncio.gather(*(ask(llm, question) for question in questions))
        for question, (text, count) in zip(questions, answers, strict=True):
            print(f"Q: {question}\nA: {text}  ({count} pieces)")

        # Cancelling the task that reads a stream aborts its request and frees its pages.
        task = asyncio.create_task(ask(llm, "Count the people in the table."))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stats = await llm.stats()
        print(f"cancelled; {stats.num_running} sequences are running")


def main() -> None:
    """Run the example."""
    asyncio.run(run())


if __name__ == "__main__":
    main()
