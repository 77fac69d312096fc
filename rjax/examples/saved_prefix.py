"""A prefix on disk: its KV is computed once, saved, and loaded by a later start.

python -m rjax.examples.saved_prefix
"""

import pathlib
import tempfile

from rjax import LLM, SamplingParams
from rjax.models.tables.demo import demo_system_prompt


def ask(llm: LLM) -> None:
    """Ask a question about the demo table, and print how much of the prompt was cached."""
    messages = [
        {"role": "system", "content": demo_system_prompt()},
        {"role": "user", "content": "Who is the oldest person?"},
    ]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=48))
    cached, prompt = output.num_cached_tokens, len(output.prompt_token_ids)
    print(f"{output.outputs[0].text}  ({cached} of {prompt} prompt tokens cached)")


def main() -> None:
    """Run the example."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "table.safetensors"
        with LLM(max_num_seqs=8, max_model_len=2048) as llm:
            ask(llm)
            tokenizer = llm.get_tokenizer()
            text = tokenizer.apply_chat_template(
                [{"role": "system", "content": demo_system_prompt()}], tokenize=False
            )
            llm.add_prefix("table", tokenizer.encode(text, add_special_tokens=False))
            llm.save_prefix("table", path)
        print(f"saved {path.stat().st_size / 2**20:.1f} MiB")

        # The server loads such a file with --prefix-file table=table.safetensors.
        with LLM(max_num_seqs=8, max_model_len=2048, prefix_files=(str(path),)) as llm:
            print(f"loaded: {', '.join(llm.prefixes())}")
            ask(llm)


if __name__ == "__main__":
    main()
