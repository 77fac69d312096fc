"""Log-probabilities: score given answers, report alternatives, search with beams.

python -m rjax.examples.scoring
"""

import math

from rjax import LLM, BeamSearchParams, SamplingParams
from rjax.models.tables.demo import demo_system_prompt


def main() -> None:
    """Run the example."""
    with LLM(max_num_seqs=8, max_model_len=2048) as llm:
        tokenizer = llm.get_tokenizer()
        prompt = tokenizer.apply_chat_template(
            [
                {"role": "system", "content": demo_system_prompt()},
                {"role": "user", "content": "What is Hollie Smigiel's job?"},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        tokens = tokenizer.encode(prompt, add_special_tokens=False)

        # The prompt is computed once for all continuations.
        jobs = ["perfumer", "glassblower", "palaeontologist"]
        answers = [f"The occupation of Hollie Smigiel is {job}." for job in jobs]
        ends = [tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
        for job, score in zip(jobs, llm.score([tokens], ends), strict=True):
            print(f"{job}: log-probability {score.logprob:.2f}, greedy: {score.is_greedy}")

        params = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
        (output,) = llm.generate([tokens], params)
        for position in output.outputs[0].logprobs or []:
            shown = [f"{e.decoded_token!r} {math.exp(e.logprob):.3f}" for e in position.values()]
            print(f"next token: {', '.join(shown)}")

        (output,) = llm.beam_search([tokens], BeamSearchParams(beam_width=3, max_tokens=24))
        for beam in output.outputs:
            print(f"beam {beam.cumulative_logprob:.2f}: {beam.text}")


if __name__ == "__main__":
    main()
