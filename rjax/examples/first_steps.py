"""First steps: load a model, answer questions, complete a text, stream an answer.

python -m rjax.examples.first_steps
"""

from rjax import LLM, SamplingParams
from rjax.models.tables.demo import demo_system_prompt


def main() -> None:
    """Run the example."""
    greedy = SamplingParams(temperature=0, max_tokens=64)
    table = {"role": "system", "content": demo_system_prompt()}
    # Without a name it is the bundled model. LLM("Qwen/Qwen3-0.6B") loads one from the hub.
    with LLM(max_num_seqs=8, max_model_len=2048) as llm:
        questions = ["Who is the oldest person?", "How many people are from Puerto Rico?"]
        conversations = [[table, {"role": "user", "content": question}] for question in questions]
        for question, output in zip(questions, llm.chat(conversations, greedy), strict=True):
            print(f"Q: {question}\nA: {output.outputs[0].text}")

        # A prompt is a text, or token ids. `generate` does not apply the chat template.
        tokenizer = llm.get_tokenizer()
        prompt = tokenizer.apply_chat_template(
            [table, {"role": "user", "content": "Count the people in the table."}],
            tokenize=False,
            add_generation_prompt=True,
        )
        (output,) = llm.generate(prompt, greedy)
        print(f"completed: {output.outputs[0].text} ({output.outputs[0].finish_reason})")

        print("streamed: ", end="")
        last = [table, {"role": "user", "content": "What is Hollie Smigiel's job?"}]
        for part in llm.stream_chat(last, greedy):
            print(part.outputs[0].text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
