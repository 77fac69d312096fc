"""Load a ``transformers`` tokenizer from a folder, a file or an object."""

import inspect
import pathlib
from typing import Any

from rjax.errors import InvalidConfigError
from rjax.tokenization.json_file import read_object

_FORMS = (
    "give a folder with tokenizer.json and tokenizer_config.json, a file tokenizer.json, or a "
    "tokenizer of transformers or tokenizers"
)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_NEEDED = (
    "__call__",
    "__len__",
    "added_tokens_decoder",
    "apply_chat_template",
    "bos_token",
    "bos_token_id",
    "chat_template",
    "convert_ids_to_tokens",
    "decode",
    "encode",
    "eos_token_id",
    "get_vocab",
)


def load_tokenizer(source: Any) -> tuple[Any, pathlib.Path | None]:
    """The tokenizer and its folder; the folder is None for a file or an object.

    Args:
        source: see `Tokenizer`.

    Raises:
        InvalidConfigError: the error names the missing file or method.
    """
    if not isinstance(source, str | pathlib.Path):
        return _ofread_object(source), None
    path = pathlib.Path(source)
    if path.is_file():
        return _of_file(path), None
    if not path.is_dir():
        raise InvalidConfigError(
            f"no tokenizer: {str(source)!r} is neither a folder nor a file; {_FORMS}"
        )
    return _of_folder(path), path


def _ofread_object(given: Any) -> Any:
    import tokenizers

    if isinstance(given, tokenizers.Tokenizer):
        return _wrapped(given)
    if isinstance(given, type):
        raise InvalidConfigError(f"the tokenizer is the class {given.__name__}; give an object")
    missing = [name for name in _NEEDED if not hasattr(given, name)]
    if missing:
        raise InvalidConfigError(
            f"the tokenizer {type(given).__name__} has no {', '.join(missing)}, which a tokenizer "
            f"of transformers has; {_FORMS}"
        )
    return given


def _wrapped(rust: Any) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast(tokenizer_object=rust)


def _of_file(path: pathlib.Path) -> Any:
    import tokenizers

    try:
        return _wrapped(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare Exceptions for files it cannot read
        raise InvalidConfigError(f"{str(path)!r} is no tokenizer.json: {_first(error)}") from error


def _of_folder(folder: pathlib.Path) -> Any:
    try:
        found = _without_processor(folder)
        template = _processor_template(folder)
        if template is not None:
            found.chat_template = template
        return found
    except Exception as error:  # transformers raises many kinds for files it cannot read
        names = ("tokenizer.json", "tokenizer_config.json")
        missing = [name for name in names if not (folder / name).is_file()]
        why = f"it has no {' and no '.join(missing)}" if missing else _first(error)
        raise InvalidConfigError(
            f"no tokenizer could be loaded from {str(folder)!r} (it needs tokenizer.json and "
            f"tokenizer_config.json): {why}"
        ) from error


def _without_processor(folder: pathlib.Path) -> Any:
    if (folder / "tokenizer.json").is_file():
        return _of_tokenizer_json(folder)
    import transformers

    return transformers.AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )


def _processor_template(folder: pathlib.Path) -> str | None:
    """The chat template of a model with images, which precedes the tokenizer's in transformers."""
    for name in ("processor_config.json", "chat_template.json"):
        found = read_object(folder / name).get("chat_template")
        if isinstance(found, str):
            return found
    return None


def _of_tokenizer_json(folder: pathlib.Path) -> Any:
    """The tokenizer of tokenizer.json, with special tokens and templates as in transformers.

    AutoTokenizer would load the class that tokenizer_config.json or config.json names. Most classes
    take only the vocabulary from tokenizer.json and replace its normalizer and pre-tokenizer.
    """
    import transformers

    found = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    config = read_object(folder / "tokenizer_config.json")
    backend = found.backend_tokenizer
    for name, token in _class_tokens(folder, config).items():
        if name in config or name in found.special_tokens_map:
            continue
        if token in found.added_tokens_encoder:  # keep its flags
            setattr(found, name, token)
        elif backend.token_to_id(token) is not None:
            found.add_special_tokens({name: token})
    return found


def _class_tokens(folder: pathlib.Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that the tokenizer's class has by default, such as GPT-2's."""
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    config = read_object(folder / "config.json")
    name = (
        tokenizer_config.get("tokenizer_class")
        or config.get("tokenizer_class")
        or TOKENIZER_MAPPING_NAMES.get(str(config.get("model_type")))
    )
    kind = getattr(transformers, str(name).removesuffix("Fast"), None)
    if not isinstance(kind, type):
        return {}
    parameters = inspect.signature(kind).parameters
    defaults = {key: parameters[key].default for key in _SPECIAL_TOKENS if key in parameters}
    return {key: str(value) for key, value in defaults.items() if value}


def _first(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
