"""Command-line flags for the engine and for sampling, under their names in Python and in vLLM.

The help texts of the engine's options are their documentation in `rjax.config`.
"""

import argparse
import decimal
import json
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from rjax.cli.parser import add_no_ops
from rjax.config import GROUPS, AutoInt
from rjax.config.option_docs import engine_option_docs, engine_options
from rjax.errors import InvalidRequestError
from rjax.vllm.options import ENGINE_NO_OPS

PYTHON_ONLY = (
    "hf_token",  # other users of the machine can read a command line; log in with the hub's client
    "skip_tokenizer_init",  # the commands need a tokenizer
    "prefix_files",  # the server has --prefix-file
    "sys_prompt",  # rjax.generate has --system-prompt, rjax.chat --system
    "sys_schema",
    "sys_prompt_file",
    "sys_schema_file",
    "use_tqdm",  # rjax.generate has --no-progress
)
"""Options of the engine without a flag."""

ENGINE_FLAGS = tuple(name for name in engine_options() if name not in PYTHON_ONLY)
"""Options of the engine that have a flag."""

_FLAGS = {"enable_relay_attention": "--relay"}  # where the flag is not the option's name
_VLLM_FLAGS = {  # other names of a flag
    "quantization": ("-q",),
    "tensor_parallel_size": ("-tp",),
    "page_size": ("--block-size",),
    "num_pages": ("--num-gpu-blocks-override",),
}
_VLLM_VALUES = {  # other names of a value
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto"},
}
_TOKEN_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_TOKENS = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgKMG]?)")


def token_count(text: str) -> int:
    """A number of tokens as in vLLM: "32768", "32k" (32,000), "32K" (32,768) or "25.6k"."""
    found = _TOKENS.fullmatch(text)
    number = decimal.Decimal(found[1]) * _TOKEN_UNITS[found[2]] if found else None
    if number is None or number != int(number):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of tokens; give one such as 32768, 32k (32,000) or 32K (32,768)"
        )
    return int(number)


class StoreModel(argparse.Action):
    """Stores the model, which may be given as MODEL or as ``--model``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, "model", None)
        if before not in (None, values, parser.get_default("model")):
            parser.error(f"two models are given, {before} and {values}")
        namespace.model = values


_SETTINGS: dict[str, dict[str, Any]] = {
    "tokenizer": {"metavar": "NAME", "type": str},
    "chat_template": {"metavar": "FILE"},
    "quantization": {"metavar": "NAME"},
    "swap_space": {"metavar": "SIZE", "type": str},
    "compilation_cache_dir": {"metavar": "FOLDER"},
    "kv_events_config": {"metavar": "JSON", "type": str},
    "model": {"action": StoreModel},
    "max_model_len": {"metavar": "N", "type": token_count},
    "max_num_batched_tokens": {"metavar": "N", "type": token_count},
}


_NOTES = {"max_model_len": " 32k is 32,000 tokens, 32K is 32,768."}


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, which may also be given as ``--model``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=argparse.SUPPRESS,
        action=StoreModel,
        help="folder or hub id of the model, as --model (default: the bundled model)",
    )


def add_engine_arguments(
    parser: argparse.ArgumentParser, defaults: Mapping[str, Any] | None = None
) -> None:
    """Add a flag for every option of the engine except `PYTHON_ONLY`, and those of vLLM that have
    no effect.

    A flag that is not given leaves no attribute, so that the engine's default holds, except for
    ``defaults``, which are the command's own.
    """
    own = defaults or {}
    texts = engine_option_docs()
    model = parser.add_argument_group("model")
    engine = parser.add_argument_group(
        "engine", f"rjax.LLM also takes these options: {', '.join(PYTHON_ONLY)}"
    )
    for name in ENGINE_FLAGS:
        field = engine_options()[name]
        of_model = name in GROUPS["model"].__dataclass_fields__
        (model if of_model else engine).add_argument(
            flag_of(name),
            *_VLLM_FLAGS.get(name, ()),
            dest=name,
            default=own.get(name, argparse.SUPPRESS),
            help=_help(texts[name])
            + _NOTES.get(name, "")
            + _default_note(own.get(name, field.default)),
            **{**_parsing(field.type), **_SETTINGS.get(name, {}), **_renamed_values(name)},
        )
    add_no_ops(engine, ENGINE_NO_OPS)


def flag_of(name: str) -> str:
    """The flag of an option."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def given_engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, by their names in `rjax.config`."""
    return {name: vars(arguments)[name] for name in ENGINE_FLAGS if name in arguments}


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `SamplingParams`; one that is not given keeps the model's default.

    ``--seed`` is one of the engine's flags, which come before.
    """
    group = parser.add_argument_group("sampling", "defaults: the model's generation_config.json")
    _option(group, "-n", "--n", type=int, help="samples of each prompt")
    _option(
        group,
        "--best-of",
        type=int,
        help="samples to generate; the n with the highest log-probability are returned",
    )
    _option(group, "--temperature", type=float, help="0 is greedy, up to 2")
    _option(
        group,
        "--top-p",
        type=float,
        help="sample from the smallest set of tokens with this probability",
    )
    _option(group, "--top-k", type=int, help="sample from the k most likely tokens; 0 is off")
    _option(
        group,
        "--min-p",
        type=float,
        help="minimum probability of a token, relative to the most likely one",
    )
    _option(group, "--presence-penalty", type=float, help="-2 to 2")
    _option(group, "--frequency-penalty", type=float, help="-2 to 2")
    _option(group, "--repetition-penalty", type=float, help="1 is off")
    _option(group, "--max-tokens", type=int, help="maximum tokens to generate")
    _option(group, "--min-tokens", type=int, help="minimum tokens before an end or stop token")
    _option(group, "--stop", action="append", metavar="TEXT", help="stop at this text; repeatable")
    _option(
        group,
        "--stop-token-id",
        dest="stop_token_ids",
        action="append",
        type=int,
        metavar="ID",
        help="stop at this token; repeatable",
    )
    _option(group, "--ignore-eos", action="store_true", help="do not stop at the end token")
    _option(
        group,
        "--include-stop-str-in-output",
        action="store_true",
        help="keep the stop text in the output",
    )
    _option(
        group,
        "--skip-special-tokens",
        action=argparse.BooleanOptionalAction,
        help="remove special tokens from the text",
    )
    _option(
        group,
        "--spaces-between-special-tokens",
        action=argparse.BooleanOptionalAction,
        help="put spaces between special tokens in the text",
    )
    _option(
        group,
        "--detokenize",
        action=argparse.BooleanOptionalAction,
        help="convert output tokens to text",
    )
    _option(group, "--logprobs", type=int, help="alternatives to report for each output token")
    _option(
        group, "--prompt-logprobs", type=int, help="alternatives to report for each prompt token"
    )
    _option(
        group,
        "--logit-bias",
        action="append",
        type=_bias,
        metavar="ID=VALUE",
        help="add to a token's logit; repeatable",
    )
    _option(
        group,
        "--allowed-token-id",
        dest="allowed_token_ids",
        action="append",
        type=int,
        metavar="ID",
        help="allow only these tokens; repeatable",
    )
    _option(
        group,
        "--bad-word",
        dest="bad_words",
        action="append",
        metavar="TEXT",
        help="never generate this word; repeatable",
    )
    _option(
        group,
        "--structured-outputs",
        type=_object,
        metavar="JSON",
        help="constrain the text: one of json (a schema), regex, choice, grammar and "
        """json_object, such as '{"choice": ["yes", "no"]}'""",
    )


SAMPLING_KEYS = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
)


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given, by their names in `SamplingParams`.

    Raises:
        InvalidRequestError: a token has two biases.
    """
    found = {key: vars(arguments)[key] for key in SAMPLING_KEYS if key in arguments}
    if "logit_bias" in found:
        pairs = found["logit_bias"]
        found["logit_bias"] = dict(pairs)
        if len(found["logit_bias"]) != len(pairs):
            raise InvalidRequestError("--logit-bias names a token twice; give each one value")
    return found


def _parsing(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type; the first member of a union decides."""
    if hint is AutoInt:
        return {"type": _auto_or_int, "metavar": "N"}
    if isinstance(hint, typing.TypeAliasType):
        return _parsing(hint.__value__)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _parsing(typing.get_args(hint)[0])
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": hint, **({"metavar": "N"} if hint in (int, float) else {})}


def _renamed_values(name: str) -> dict[str, Any]:
    """Settings of a flag that takes vLLM's names of values too."""
    names = _VLLM_VALUES.get(name)
    return {"type": lambda given: names.get(given, given)} if names else {}


def _help(text: str) -> str:
    """An option's documentation with other options under the names of their flags."""

    def named(match: re.Match[str]) -> str:
        return flag_of(match[1]) if match[1] in ENGINE_FLAGS else match[1]

    return re.sub("``(.*?)``", named, text).replace("%", "%%")


def _default_note(default: object) -> str:
    if default is None:  # the text says what None is
        return ""
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f" (default: {default})"


def _option(group: Any, *names: str, **settings: Any) -> None:
    group.add_argument(*names, default=argparse.SUPPRESS, **settings)


def _auto_or_int(text: str) -> AutoInt:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number; give a whole number, or auto"
        ) from None


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.200} is no JSON object")
    return found


def _bias(text: str) -> tuple[int, float]:
    token, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form ID=VALUE")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form ID=VALUE") from None
