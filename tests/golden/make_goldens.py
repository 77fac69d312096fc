"""Tiny random models with what transformers computes from them, for tests that run without torch.

Usage, in an environment with torch and transformers:

    python tests/golden/make_goldens.py [folder with cases.json] [folder to write] [case ...]

Both folders are that of this file by default; ``families`` beside it is another. Without names, all
cases are made.

Writes ``models/<case>/`` (a Hugging Face folder, bfloat16 values), ``expected/<case>.safetensors``
(tokens, positions, float32 logits; a prompt and its greedy continuation) and ``versions.json``,
which has the cases that were made alone with other versions by name.

Beside its config, a case may have ``stride`` (between positions), ``shard`` (size of a file), and
``rewritten`` (fields put into the written config.json, which is then read again; null removes one),
``greedy`` (false where the angles depend on the length so far), ``seed``, ``fused`` (all experts
of a layer in one tensor, as transformers 5 has them in memory), ``gate_up_spread`` (a factor on
their first projection, so that activations reach a clamp), ``tokens`` and ``prompt`` (how many
there are) and ``renamed`` (starts of tensors' names and what replaces them in the files, which
transformers then reads again).

A case with a ``text_config`` is a model with towers for other media, whose text model alone is
used.
"""

import copy
import json
import platform
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
TOKENS = 37  # odd, and longer than every sliding window of the cases
PROMPT = 9
NEW_TOKENS = 12


def auto_class(settings: dict) -> type:
    """The class that makes a model of a case."""
    if "text_config" in settings:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def rename_tensors(folder: Path, renamed: dict[str, str]) -> None:
    """Replace the starts of the names of the tensors in a folder with one file of weights."""

    def of(name: str) -> str:
        old = next((start for start in renamed if name.startswith(start)), "")
        return renamed.get(old, "") + name.removeprefix(old)

    file = folder / "model.safetensors"
    save_file(
        {of(name): tensor for name, tensor in load_file(file).items()},
        file,
        metadata={"format": "pt"},
    )


def make_model(
    settings: dict, seed: int, gate_up_spread: float = 1.0
) -> transformers.PreTrainedModel:
    """A random model whose every parameter matters: biases and norm weights are random too."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**settings)
    config.dtype = torch.float32
    model = auto_class(settings).from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            # A tied embedding must be small, or every token predicts itself.
            tied = "embed" in name and config.tie_word_embeddings
            spread = 0.1 if tied else 1.0 if "embed" in name else 1.2 * parameter.shape[-1] ** -0.5
            value = spread * torch.randn(parameter.shape)
            if name.endswith("gate_up_proj"):
                value *= gate_up_spread
        else:
            factors = ("norm.weight", "norm_1.weight", "norm_2.weight", "scale")
            value = 0.3 * torch.randn(parameter.shape) + float(name.endswith(factors))
            if name.endswith("A_log"):  # states that forget at once, and others that hardly do
                value = 1.5 * torch.randn(parameter.shape) - 2.0
            if "Gemma4" in type(model).__name__ and name.endswith("q_norm.weight"):
                value *= parameter.shape[-1] ** -0.5  # scores have no factor beside it
        parameter.data = value.to(torch.bfloat16).float()
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_((0.3 * torch.randn(buffer.shape)).to(torch.bfloat16))
        if name.endswith("layer_scalar"):  # Gemma 4's factor of each layer
            buffer.copy_((0.8 + 0.2 * torch.randn(buffer.shape)).to(torch.bfloat16))
    return model.eval()


def write_case(name: str, settings: dict, seed: int, folder: Path) -> None:
    """One model folder and one file of expectations."""
    settings = dict(settings)
    stride = settings.pop("stride", 1)
    shard = settings.pop("shard", "1GB")
    rewritten = settings.pop("rewritten", {})
    greedy = settings.pop("greedy", True)
    seed = settings.pop("seed", seed)
    num_tokens, num_prompt = settings.pop("tokens", TOKENS), settings.pop("prompt", PROMPT)
    fused = settings.pop("fused", False)
    renamed = settings.pop("renamed", {})
    model = make_model(settings, seed, settings.pop("gate_up_spread", 1.0))
    # A copy is cast: with the model, the rotary frequencies would be.
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.save_pretrained(
        folder / "models" / name, max_shard_size=shard, save_original_format=not fused
    )
    (folder / "models" / name / "generation_config.json").unlink(missing_ok=True)
    if renamed:
        rename_tensors(folder / "models" / name, renamed)
    if rewritten or renamed:
        file = folder / "models" / name / "config.json"
        fields = json.loads(file.read_text()) | rewritten
        fields = {name: value for name, value in fields.items() if value is not None}
        file.write_text(json.dumps(fields, indent=2) + "\n")
        # Only transformers says what it computes for such a file.
        model = (
            auto_class(settings)
            .from_pretrained(file.parent, dtype=torch.float32, attn_implementation="eager")
            .eval()
        )
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocab_size, (1, num_tokens))
    # Strided positions reach far with few tokens. The mask keeps each token seeing all before it.
    positions = torch.arange(num_tokens)[None] * stride
    with torch.no_grad():
        logits = model(
            input_ids=tokens, position_ids=positions, attention_mask=torch.ones_like(tokens)
        ).logits
        prompt = tokens[:, :num_prompt]
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    expected = {
        "tokens": tokens[0].int(),
        "positions": positions[0].int(),
        "logits": logits[0].float(),
        "prompt": prompt[0].int(),
    }
    if greedy:
        expected["greedy"] = output[0, num_prompt:].int()
    (folder / "expected").mkdir(parents=True, exist_ok=True)
    save_file(
        {key: value.contiguous().clone() for key, value in expected.items()},
        folder / "expected" / f"{name}.safetensors",
    )


def main() -> None:
    """Write the cases of a folder's cases.json."""
    cases = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else cases
    found = json.loads((cases / "cases.json").read_text())
    for seed, (name, settings) in enumerate(found.items()):
        if name in (sys.argv[3:] or found):
            write_case(name, settings, seed, folder)
    if sys.argv[3:]:
        return  # each config.json has the version of transformers; the file is about all cases
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    file = folder / "versions.json"
    kept = json.loads(file.read_text()) if sys.argv[3:] and file.exists() else versions
    of_cases = kept.pop("cases", {}) | dict.fromkeys(sys.argv[3:], versions)
    others = {name: own for name, own in sorted(of_cases.items()) if own != kept}
    kept |= {"cases": others} if others else {}
    file.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
