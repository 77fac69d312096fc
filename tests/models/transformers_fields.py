"""The fields of config.json that transformers' own source knows, without torch."""

import ast
import dataclasses
import functools
from pathlib import Path
from typing import get_type_hints

import transformers
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_ROOT = Path(transformers.__file__).parent
# What every decoder-only model of transformers runs through beside its own file.
_SHARED = (
    "cache_utils.py",
    "masking_utils.py",
    "modeling_rope_utils.py",
    "utils/generic.py",
    "utils/output_capturing.py",
)
_METHODS = {"get_text_config", "standardize_rope_params", "validate_rope"}


def declared(model_type: str) -> set[str]:
    """Fields that the config class declares."""
    return {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}


def looked_at(model_type: str) -> set[str]:
    """Fields that the model's code reads from its config, declared or not."""
    folder = model_type.removesuffix("_text")
    own = _parse(f"models/{folder}/modeling_{folder}.py")
    if folder != model_type:  # models with vision follow the text model, or surround it
        names = [getattr(node, "name", "") for node in own.body]
        last = next(i for i, name in enumerate(names) if name.endswith("ForCausalLM"))
        whole = names[last].replace("ForCausalLM", "Model")
        text = [
            node
            for node, name in zip(own.body[: last + 1], names, strict=False)
            if "Vision" not in name and "Audio" not in name and name != whole
        ]
        own = ast.Module(text, [])
    trees = [own, *map(_parse, _SHARED)]
    return {name for tree in trees for name in _attributes(tree)} - _METHODS


def looked_at_in(folder: str, part: str) -> set[str]:
    """Fields that those classes of a model's file read whose names have a part, such as "Text"."""
    own = _parse(f"models/{folder}/modeling_{folder}.py")
    chosen = [node for node in own.body if isinstance(node, ast.ClassDef) and part in node.name]
    trees = [ast.Module(list(chosen), []), *map(_parse, _SHARED)]
    return {name for tree in trees for name in _attributes(tree)} - _METHODS


def taken_from_keywords() -> set[str]:
    """Undeclared fields that every config class looks for, older spellings among them."""
    functions = {"__post_init__", "convert_rope_params_to_dict"}
    trees = [_parse("configuration_utils.py"), _parse("modeling_rope_utils.py")]
    return {
        node.args[0].value
        for tree in trees
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "kwargs"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }


def rope_fields() -> set[str]:
    """Fields of rope_parameters."""
    return set(get_type_hints(RopeParameters))


@functools.cache
def _parse(file: str) -> ast.Module:
    return ast.parse((_ROOT / file).read_text())


def _attributes(tree: ast.Module) -> set[str]:
    """Names after ``config.`` and in ``getattr(config, ...)``, for whatever ends in "config"."""

    def is_config(node: ast.expr) -> bool:
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
        return name.endswith("config") and not name.startswith("generation")

    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_config(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            config, name = node.args[:2]
            if is_config(config) and isinstance(name, ast.Constant):
                found.add(name.value)
    return found
