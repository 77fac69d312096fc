"""The parts of the pages that are made from the code, and those of `tests.docs.kept_results`.

Between ``<!-- generated: NAME -->`` and ``<!-- end -->`` a page holds the text of one function of
`BLOCKS`. This writes all of them again:

    python -m tests.docs.generated
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from rjax.chat.session import _HELP
from rjax.cli.arguments import _VLLM_FLAGS, PYTHON_ONLY, flag_of
from rjax.config import EngineConfig
from rjax.config.option_docs import engine_option_docs, engine_options
from rjax.engine.stats import EngineStats
from rjax.engine_channel.facts import facts_of
from rjax.models.families import TEXT_FAMILIES
from rjax.models.families.family import Family
from rjax.models.families.multimodal_models import MULTIMODAL
from rjax.models.families.rope_fields import ROPE_KINDS
from rjax.serve.loading.service_builder import _cache_figures
from rjax.serve.telemetry.metrics import Metrics
from rjax.vllm.modules import HOMES, MISSING
from rjax.vllm.names import (
    ARGUMENTS,
    BEAM_FIELDS,
    CONFIG_CLASSES,
    ENGINE_ARGUMENTS,
    METHODS,
    PROMPT_KEYS,
    RESET_ARGUMENTS,
    SAMPLING_FIELDS,
    STRUCTURED_FIELDS,
)
from rjax.vllm.options import _INSTEAD, ENGINE_NO_OPS, OPTION_NO_OPS, SERVER_NO_OPS
from tests.docs.kept_results import KEPT_RESULTS
from tests.docs.pages import DOCS, ROOT, table

GOLDENS = ROOT / "tests" / "golden"
EXAMPLES = sorted((ROOT / "rjax" / "examples").glob("[!_]*.py"))


def models() -> str:
    """The families, from their registry, and the goldens that each is checked against."""
    goldens = _goldens()
    rows = []
    for name, family in TEXT_FAMILIES.items():
        kinds = family.fields.constraints["model_type"].allowed.split(":")[0]
        rows.append(
            [
                family.models,
                f"`{name}`",
                f"`{kinds.replace(' or ', '`, `')}`",
                ", ".join(f"{count} of {version}" for version, count in goldens[name].items()),
            ]
        )
    kinds = ", ".join(f"`{kind}`" for kind in sorted(ROPE_KINDS))
    head = ["models", "`architectures`", "`model_type`", "checked against"]
    return (
        table(head, rows)
        + "\n\nThe last column counts random small models of the family whose logits and greedy "
        "tokens equal those of that version of transformers.\n\n"
        f"The type of rope scaling is one of {kinds}; Phi-3 has only `default` and `longrope`, "
        "Gemma 4 `default`, `linear` and `proportional`."
    )


def multimodal() -> str:
    """The architectures with towers, of which the text model is served."""
    goldens = _goldens()
    rows = [
        [
            family.models,
            f"`{family.architecture}`",
            ", ".join(
                f"`{kind}`" for text in family.texts for kind in sorted(text.fields.model_types)
            ),
            f"text only, no {family.media.replace(' and ', ' or ')}",
            ", ".join(
                f"{count} of {version}" for version, count in goldens[family.architecture].items()
            ),
        ]
        for family in MULTIMODAL
    ]
    head = ["models", "`architectures`", "`model_type` of the text", "served", "checked against"]
    return table(head, rows)


def _families_of_text_configs() -> dict[str, Family]:
    """The families that only text models beside towers have."""
    texts = (text for family in MULTIMODAL for text in family.texts)
    return {text.architecture: text for text in texts if text.architecture not in TEXT_FAMILIES}


def _goldens() -> dict[str, Counter[str]]:
    """Per architecture, the goldens made by each version of transformers."""
    found: dict[str, Counter[str]] = {}
    for folder in (GOLDENS, *(GOLDENS / name for name in ("families", "experts", "multimodal"))):
        for path in sorted((folder / "models").glob("*/config.json")):
            config = json.loads(path.read_text(encoding="utf-8"))
            [name] = config["architectures"]
            found.setdefault(name, Counter())[f"transformers {config['transformers_version']}"] += 1
    return found


def constraints() -> str:
    """What config.json may say of the fields that rjax does not read, by family."""
    found: dict[tuple[str, str], list[str]] = {}
    families = TEXT_FAMILIES | _families_of_text_configs()
    for name, family in families.items():
        for field, constraint in family.fields.constraints.items():
            if field != "model_type":
                short = name.removesuffix("ForCausalLM").removesuffix("TextModel")
                found.setdefault((field, constraint.allowed), []).append(short)
    rows = [
        [f"`{field}`", allowed, "all" if len(names) == len(families) else ", ".join(names)]
        for (field, allowed), names in sorted(found.items())
    ]
    return table(["field", "must be", "families"], rows)


def options() -> str:
    """The engine's options with their flags, defaults and documentation."""
    texts, rows = engine_option_docs(), []
    for name, field in engine_options().items():
        flag = "" if name in PYTHON_ONLY else f"`{flag_of(name)}`"
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        rows.append([f"`{name}`", flag, default, texts[name].replace("``", "`")])
    return table(["option", "flag", "default", "meaning"], rows)


def vllm_names() -> str:
    """Flags that may be given under vLLM's name."""
    rows = [
        [f"`{name}`", f"`{flag_of(option)}`"]
        for option, names in _VLLM_FLAGS.items()
        for name in names
    ]
    return table(["vLLM", "rjax"], rows)


def vllm_no_ops() -> str:
    """Flags of vLLM that are accepted and have no effect."""
    texts = ENGINE_NO_OPS | SERVER_NO_OPS
    return table(["flag", "why"], [[f"`{flag}`", text] for flag, text in texts.items()])


def vllm_names_refused() -> str:
    """Fields, arguments, keys and methods of vLLM's classes, and what takes their place."""
    parts = {
        "`SamplingParams`": SAMPLING_FIELDS,
        "`StructuredOutputsParams`": STRUCTURED_FIELDS,
        "`BeamSearchParams`": BEAM_FIELDS,
        "`generate`, `chat`, `beam_search`": ARGUMENTS,
        "`reset_prefix_cache`": RESET_ARGUMENTS,
        "`from_engine_args`": ENGINE_ARGUMENTS,
        "a prompt's keys": PROMPT_KEYS,
        "methods of `LLM` and `AsyncLLM`": METHODS,
        "classes of `vllm.config`": CONFIG_CLASSES,
    }
    rows = []
    for part, known in parts.items():
        names: dict[str, list[str]] = {}
        for name, why in known.items():
            names.setdefault(why, []).append(f"`{name}`")
        rows += [[part, ", ".join(same), why] for why, same in names.items()]
    return table(["of", "name", "instead"], rows)


def vllm_modules() -> str:
    """Modules of vLLM from which scripts can import, and the names there."""
    rows = [
        [f"`rjax.{module}`", ", ".join(f"`{n}`" for n in names)] for module, names in HOMES.items()
    ]
    return table(["module", "names"], rows)


def vllm_modules_missing() -> str:
    """Modules of vLLM that rjax lacks, and what takes their place."""
    modules: dict[str, list[str]] = {}
    for module, why in MISSING.items():
        modules.setdefault(why, []).append(f"`vllm.{module}`")
    return table(["modules", "instead"], [[", ".join(same), why] for why, same in modules.items()])


def vllm_option_no_ops() -> str:
    """Options of vLLM's Python classes that are accepted and have no effect."""
    return table(["option", "why"], [[f"`{name}`", why] for name, why in OPTION_NO_OPS.items()])


def vllm_instead() -> str:
    """Flags of vLLM that are refused, and what takes their place."""
    rows = [[", ".join(f"`{flag}`" for flag in flags.split()), text] for flags, text in _INSTEAD]
    return table(["flags", "instead"], rows)


def exposition() -> str:
    """What /metrics answers, with a sample of every metric."""
    stats = EngineStats(backend="xla", device="1 x cpu", page_bytes=1)
    engine = SimpleNamespace(
        config=EngineConfig(),
        stats=lambda: stats,
        model_config=SimpleNamespace(vocab_size=1),
        max_model_len=1,
        tokenizer=None,
        summary={"dtype": "bfloat16"},
    )
    return Metrics("m", _cache_figures(facts_of(engine))).exposition(stats).decode()


def metrics() -> str:
    """The metrics with the prefix rjax, from the server's exposition."""
    return _metrics("rjax:")


def vllm_metrics() -> str:
    """Those with vLLM's own names."""
    return _metrics("vllm:")


def _metrics(prefix: str) -> str:
    rows = []
    for family in text_string_to_metric_families(exposition()):
        if family.name.endswith("_created") or not family.name.startswith(prefix):
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        common = {"model_name", "engine", "le"}
        labels = {label for s in family.samples for label in s.labels} - common
        rows.append([f"`{name}`", family.type, ", ".join(sorted(labels)), family.documentation])
    return table(["metric", "type", "labels", "meaning"], sorted(rows))


def chat() -> str:
    """The chat's commands."""
    return f"```text\n{_HELP.strip()}\n```"


def examples() -> str:
    """The examples with the first line of their docstrings."""
    rows = []
    for path in EXAMPLES:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        rows.append([f"`{path.stem}`", text.splitlines()[0].replace("``", "`")])
    return table(["example", "what it shows"], rows)


BLOCKS: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        *KEPT_RESULTS,
        models,
        multimodal,
        constraints,
        options,
        vllm_names,
        vllm_no_ops,
        vllm_names_refused,
        vllm_modules,
        vllm_modules_missing,
        vllm_option_no_ops,
        vllm_instead,
        metrics,
        vllm_metrics,
        chat,
        examples,
    )
}


def filled(text: str) -> str:
    """A page with its generated parts made again."""

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}\n{BLOCKS[match[2]]()}\n{match[3]}"

    pattern = r"^(<!-- generated: (\w+) -->)$.*?^(<!-- end -->)$"
    return re.sub(pattern, part, text, flags=re.MULTILINE | re.DOTALL)


def generated_pages() -> list[Path]:
    """The pages with generated parts."""
    pages = sorted(DOCS.rglob("*.md"))
    return [page for page in pages if "<!-- generated" in page.read_text(encoding="utf-8")]


if __name__ == "__main__":
    for page in generated_pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
