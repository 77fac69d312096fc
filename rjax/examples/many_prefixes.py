"""Several shared prefixes in one batch.

Three system prompts are registered under a name, which pins their KV. A batch mixes requests of all
three, and each prefix is read once per decode step. Requests need not name a prefix: rjax finds
it from the tokens.

    python -m rjax.examples.many_prefixes
"""

from rjax import LLM, SamplingParams
from rjax.models.tables.demo import demo_system_prompt


def split_table(parts: int) -> list[str]:
    """System prompts with equal shares of the demo table's rows."""
    title, names, rule, *people = demo_system_prompt().strip().split("\n| ")
    size = len(people) // parts
    return [
        "\n| ".join([title, names, rule, *people[i * size : (i + 1) * size]]) for i in range(parts)
    ]


def main() -> None:
    """Run the example."""
    greedy = SamplingParams(temperature=0, max_tokens=48)
    tables = split_table(3)
    with LLM(max_num_seqs=8, max_model_len=2048) as llm:
        tokenizer = llm.get_tokenizer()
        for number, table in enumerate(tables):
            text = tokenizer.apply_chat_template(
                [{"role": "system", "content": table}], tokenize=False
            )
            tokens = tokenizer.encode(text, add_special_tokens=False)
            llm.add_prefix(f"team-{number}", tokens)
        print(f"pinned: {', '.join(llm.prefixes())}")

        before = llm.stats()
        questions = [
            "Who is the oldest person?",
            "Who is the youngest person?",
            "Count the people in the table.",
        ]
        batch = [
            [{"role": "system", "content": table}, {"role": "user", "content": question}]
            for question in questions
            for table in tables
        ]
        outputs = llm.chat(batch, greedy)
        for conversation, output in zip(batch, outputs, strict=True):
            team = tables.index(conversation[0]["content"])
            cached = output.num_cached_tokens
            print(f"team-{team}: {output.outputs[0].text}  ({cached} prompt tokens cached)")
        after = llm.stats()
        read = after.kv_tokens_read - before.kv_tokens_read
        unshared = after.kv_tokens_unshared - before.kv_tokens_unshared
        print(f"KV tokens read: {read:,}; without sharing it would be {unshared:,}")

        # With a name, `generate` puts the prefix in front of the prompt. Token ids stay token ids.
        question = "<|user|>Who is the oldest person?<|end|><|assistant|>"
        prompt = tokenizer.encode(question, add_special_tokens=False)
        (output,) = llm.generate([prompt], greedy, prefix="team-2")
        print(f"team-2 by its name: {output.outputs[0].text}")
        llm.drop_prefix("team-2")


if __name__ == "__main__":
    main()
