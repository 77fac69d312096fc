"""What transformers' beam search finds with the tiny models of ``make_goldens.py``.

Usage, in an environment with torch and transformers:

    python tests/golden/make_beams.py

Writes ``expected/beams.json``: for each case model, prompt, settings, and the beams, best first,
with their sums of log-probabilities divided by length to the power of the length penalty.
"""

import itertools
import json
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
MODELS = ("llama_g7_h64", "qwen3_g8_h128_tied")
SETTINGS = [
    {"num_beams": beams, "length_penalty": penalty, "early_stopping": early, "eos": eos}
    for beams, penalty, early, eos in itertools.product(
        (2, 4), (0.0, 1.0, -0.5), (False, True, "never"), ((), (3, 11, 17, 40), (5,))
    )
]
NEW_TOKENS = 10


def beams(model, prompt: list[int], settings: dict) -> dict:
    """One search; the beams' tokens without padding."""
    eos = list(settings["eos"])
    width = settings["num_beams"]
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=settings["length_penalty"],
        early_stopping=settings["early_stopping"],
        max_new_tokens=NEW_TOKENS,
        eos_token_id=eos or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for row in output.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in eos]
        found.append(row[: ends[0] + 1] if ends else row)
    return {"tokens": found, "scores": output.sequences_scores.tolist()}


def main() -> None:
    """Write every case."""
    cases = []
    for name in MODELS:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            HERE / "models" / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        model.generation_config.eos_token_id = None
        for seed, settings in enumerate(SETTINGS):
            torch.manual_seed(seed)
            prompt = torch.randint(model.config.vocab_size, (5 + seed % 9,)).tolist()
            expected = beams(model, prompt, settings)
            cases.append({"model": name, "prompt": prompt, **settings, **expected})
    record = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "new_tokens": NEW_TOKENS,
        "cases": cases,
    }
    (HERE / "expected" / "beams.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
