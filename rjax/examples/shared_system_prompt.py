"""A system prompt that all requests share: stored once, and read once per decode step.

The system prompt is replaced at run time, without recompilation.

    python -m rjax.examples.shared_system_prompt
"""

from rjax import LLM, SamplingParams
from rjax.models.tables.demo import demo_system_prompt

SCHEMA = "<|begin|><|system|>{__SYS_PROMPT}<|end|><|user|>{__USR_PROMPT}<|end|><|assistant|>"
"""The chat format of the bundled model, around the system prompt and the prompt."""

QUESTIONS = [
    "Who is the oldest person?",
    "Count the people in the table.",
    "What is Hollie Smigiel's job?",
    "How many people are from Puerto Rico?",
]


def main() -> None:
    """Run the example."""
    greedy = SamplingParams(temperature=0, max_tokens=64)
    with LLM(
        sys_prompt=demo_system_prompt(), sys_schema=SCHEMA, max_num_seqs=8, max_model_len=2048
    ) as llm:
        for output in llm.generate(QUESTIONS, greedy):
            cached, prompt = output.num_cached_tokens, len(output.prompt_token_ids)
            print(f"{output.outputs[0].text}  ({cached} of {prompt} prompt tokens cached)")
        stats = llm.stats()
        print(
            f"KV tokens read: {stats.kv_tokens_read:,}; without sharing it would be "
            f"{stats.kv_tokens_unshared:,}"
        )
        print(
            f"KV memory: {stats.peak_kv_bytes / 2**20:.1f} MiB; without sharing it would be "
            f"{stats.peak_kv_bytes_unshared / 2**20:.1f} MiB"
        )

        header, *rows = demo_system_prompt().split("\n| ")
        llm.fill_prefix_kv_cache("\n| ".join([header, *rows[:6]]))  # the first four people
        (output,) = llm.generate("Count the people in the table.", greedy)
        print(f"after the change: {output.outputs[0].text}")


if __name__ == "__main__":
    main()
