"""Which fields of config.json change what transformers computes, for tests that run without torch.

Usage, in an environment with rjax, torch and transformers:

    python tests/golden/make_field_effects.py [architecture ...]

Writes ``field_effects.json`` beside this file. For every family and every field of its table, it
gives the values of ``tests/models/field_cases.py`` to a tiny random model, each in a config.json
that transformers reads itself. Without architectures, all families are tried.

The groups of a family:

- ``changes``: a value changes the logits, or the shapes of the parameters;
- ``same``: transformers takes a value, and none changes anything;
- ``refused``: transformers takes no value;
- ``null_differs``: null computes something else than a config.json without the field;
- ``null_refused``: transformers does not take null, or needs the field;
- ``versions``: of what tried it, if they are not those of the file.
"""

import functools
import json
import sys
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.initialization import no_init_weights

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "models"))

from field_cases import BASES, REFUSED, change_of, model_types  # noqa: E402

from rjax.models.families import TEXT_FAMILIES  # noqa: E402

FILE = HERE / "field_effects.json"
TOKENS = 37
PROMPT = 23  # of two calls with a KV cache
SMALLEST = 1e-6  # a change of the logits
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
OTHERS = (True, False, 0, 1, 3, 0.5, "text", [1], {"0": "a"}, "sdpa")
"""Values of fields that the tables ignore."""
TRIED = 3
"""Values of those that are enough, if transformers takes them."""

type Outcome = dict[str, torch.Tensor] | None


@functools.cache
def values_of(name: str, shape: torch.Size) -> torch.Tensor:
    """Random values of a parameter that depend on its name and shape alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    if len(shape) >= 2:
        return values * (0.5 if "embed" in name else 1.2 * shape[-1] ** -0.5)
    return 0.3 * values + float("norm" in name and name.endswith("weight"))


def compute(values: dict[str, Any], folder: Path, plain: str | None) -> Outcome:
    """What a config.json computes: the logits of one call and of two, and the parameters' sizes.

    None if transformers does not take it.
    """
    (folder / "config.json").write_text(json.dumps(values))
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        chosen = {} if plain is None else dict.fromkeys(_IMPLEMENTATIONS, plain)
        with no_init_weights():
            model = transformers.AutoModelForCausalLM.from_config(config, **chosen).eval()
        model.tie_weights()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values_of(name, parameter.shape))
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):
                    buffer.copy_(values_of(name, buffer.shape))
            return {
                "sizes": torch.tensor([p.numel() for p in model.parameters()]),
                "logits": logits_of(model),
            }
    except Exception as error:  # whatever a config class or a model says no with
        print(f"    {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"[:150])
        return None


def logits_of(model: Any) -> torch.Tensor:
    """The logits of all tokens at once, and of two parts with a KV cache."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, (1, TOKENS), generator=generator)
    mask = torch.ones_like(tokens)
    options = {"use_cache": True, "return_dict": True}
    whole = model(input_ids=tokens, attention_mask=mask, **options).logits
    first = model(input_ids=tokens[:, :PROMPT], attention_mask=mask[:, :PROMPT], **options)
    rest = model(
        input_ids=tokens[:, PROMPT:],
        attention_mask=mask,
        past_key_values=first.past_key_values,
        **options,
    )
    return torch.cat([whole, first.logits, rest.logits], 1).float()


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two configs compute something else."""
    if one["sizes"].tolist() != other["sizes"].tolist():
        return True
    return not torch.allclose(one["logits"], other["logits"], rtol=0, atol=SMALLEST)


def cases_of(architecture: str, field: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(a config, the same with another value of a field)."""
    table, base = TEXT_FAMILIES[architecture].fields, BASES[architecture]
    if field in table.reads:
        yield change_of(architecture, field)
    else:
        for value in REFUSED.get(field, OTHERS) if field in table.constraints else OTHERS:
            yield base, base | {field: value}


class Effects:
    """The effects of the fields of one family."""

    def __init__(self, architecture: str, folder: Path) -> None:
        self._architecture = architecture
        self._folder = folder
        self._kept: dict[str, Outcome] = {}
        self.found: dict[str, list[str]] = {
            name: [] for name in ("changes", "same", "refused", "null_differs", "null_refused")
        }

    def _compute(self, field: str, values: dict[str, Any], plain: str | None) -> Outcome:
        own = {"model_type": model_types(self._architecture)[0], "pad_token_id": None}
        values = own | values
        if values.get("num_key_value_heads", 0) is None and field != "num_key_value_heads":
            values["num_key_value_heads"] = values.get("num_attention_heads")  # its meaning
        key = json.dumps([values, plain])
        if key not in self._kept:
            self._kept[key] = compute(values, self._folder, plain)
        return self._kept[key]

    def try_field(self, field: str) -> None:
        """Put a field into the groups that it belongs to."""
        # Plain PyTorch has soft caps, sinks and experts of any size.
        plain = None if field.endswith("_implementation") else "eager"
        taken = 0
        group = "refused"
        base = BASES[self._architecture]
        for base, changed in cases_of(self._architecture, field):
            if changed == base:
                continue
            result = self._compute(field, changed, plain)
            reference = self._compute(field, base, plain)
            if result is None or reference is None:
                continue
            taken += 1
            group = "same"
            if differ(result, reference):
                group = "changes"
                break
            if taken == TRIED:
                break
        self.found[group].append(field)
        if field in TEXT_FAMILIES[self._architecture].fields.reads:
            self._try_null(field, base)

    def _try_null(self, field: str, base: dict[str, Any]) -> None:
        absent = {name: value for name, value in base.items() if name != field}
        of_null = self._compute(field, absent | {field: None}, "eager")
        of_absent = self._compute(field, absent, "eager")
        if of_null is None or of_absent is None:
            self.found["null_refused"].append(field)
        elif differ(of_null, of_absent):
            self.found["null_differs"].append(field)


def main() -> None:
    """Write the effects of the fields of all families, or of some."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found = json.loads(FILE.read_text()) if FILE.exists() else {"families": {}}
    for architecture in sys.argv[1:] or sorted(TEXT_FAMILIES):
        print(architecture, flush=True)
        values_of.cache_clear()
        table = TEXT_FAMILIES[architecture].fields
        fields = table.reads | table.constraints.keys() | table.ignores
        with tempfile.TemporaryDirectory() as folder:
            effects = Effects(architecture, Path(folder))
            for field in sorted(fields - {"architectures", "quantization_config"}):
                print(f"  {field}", flush=True)
                effects.try_field(field)
        found["families"][architecture] = effects.found
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        if sys.argv[1:]:  # those of the file are of the other families
            found["families"][architecture] |= {"versions": versions}
        else:
            found["versions"] = versions
        FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
