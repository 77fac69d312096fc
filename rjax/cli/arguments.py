"""Command-line flags for the engine and for sampling, under their names in Python."""

import argparse
import json
from typing import Any

from rjax.errors import InvalidRequestError


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the model and the engine; one that is not given keeps the engine's default."""
    model = parser.add_argument_group("model")
    _option(model, "--model", help="Hugging Face folder or hub id (default: the bundled model)")
    _option(model, "--tokenizer", help="folder or hub id of the tokenizer, where it is another")
    _option(model, "--revision", help="branch, tag or commit on the hub")
    _option(
        model,
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of weights, and of KV unless --kv-cache-dtype is another (default: auto)",
    )
    _option(
        model,
        "--load-format",
        choices=("auto", "dummy"),
        help="dummy draws random weights from config.json alone",
    )
    _option(model, "--max-model-len", type=int, help="most tokens of prompt and output together")
    _option(model, "--chat-template", metavar="FILE", help="Jinja file that replaces the model's")

    engine = parser.add_argument_group("engine")
    _option(
        engine,
        "--relay",
        dest="enable_relay_attention",
        choices=("auto", "on", "off"),
        help="read shared beginnings once: always, never, or where it pays (default: auto); "
        "the answers are the same",
    )
    _option(engine, "--backend", help="attention backend (default: the best for the device)")
    _option(engine, "--max-num-seqs", type=int, help="sequences that generate at once")
    _option(
        engine,
        "--max-num-prefill-ahead",
        type=int,
        help="further ones whose prompts are computed meanwhile (default: as many, on Hopper)",
    )
    _option(engine, "--max-num-batched-tokens", type=int, help="token budget of a step")
    _option(
        engine,
        "--num-decode-steps",
        type=int,
        help="decode steps started at once; 8 spares small models the host (default: 1)",
    )
    _option(engine, "--num-pages", type=int, help="size of the KV pool (default: what fits)")
    _option(
        engine,
        "--kv-cache-dtype",
        choices=("auto", "fp8", "fp8_e4m3"),
        help="fp8, the same as fp8_e4m3, keeps KV in one byte a number, with scales of 1: what is"
        " beyond 448 is clipped (default: auto, the dtype of the weights)",
    )
    _option(engine, "--page-size", type=int, help="tokens a page: 8, 16, 32, 64, 128 or 256")
    _option(
        engine, "--gpu-memory-utilization", type=float, help="share of the device's memory to use"
    )
    _option(
        engine,
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="keep the KV of finished requests for prompts that begin alike (default: on)",
    )
    _option(
        engine,
        "--swap-space",
        metavar="SIZE",
        help="page-locked host memory for the KV of preempted sequences, in GiB or with a unit,"
        " such as 512MiB; XLA gives out 64 GiB unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is set"
        " (default: 4)",
    )
    _option(
        engine,
        "--preemption",
        choices=("auto", "swap", "recompute"),
        help="what becomes of their KV (default: auto, whichever is quicker)",
    )
    _option(engine, "--max-logprobs", type=int, help="most alternatives --logprobs may ask for")
    _option(engine, "--tensor-parallel-size", type=int, help="devices to spread the model over")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `SamplingParams`; one that is not given keeps the model's default."""
    group = parser.add_argument_group("sampling", "defaults: the model's generation_config.json")
    _option(group, "-n", type=int, help="samples of each prompt")
    _option(group, "--best-of", type=int, help="samples to choose the n likeliest from")
    _option(group, "--temperature", type=float, help="0 is greedy, up to 2")
    _option(group, "--top-p", type=float, help="smallest set of tokens with this probability")
    _option(group, "--top-k", type=int, help="the k likeliest tokens; 0 is off")
    _option(group, "--min-p", type=float, help="least share of the likeliest token's probability")
    _option(group, "--presence-penalty", type=float, help="-2 to 2")
    _option(group, "--frequency-penalty", type=float, help="-2 to 2")
    _option(group, "--repetition-penalty", type=float, help="1 is off")
    _option(group, "--seed", type=int, help="same seed, same answers")
    _option(group, "--max-tokens", type=int, help="most tokens to generate")
    _option(group, "--min-tokens", type=int, help="no end before this many tokens")
    _option(group, "--stop", action="append", metavar="TEXT", help="end at this text; repeatable")
    _option(
        group,
        "--stop-token-id",
        dest="stop_token_ids",
        action="append",
        type=int,
        metavar="ID",
        help="end at this token; repeatable",
    )
    _option(group, "--ignore-eos", action="store_true", help="go on after the end token")
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
        help="leave special tokens out of the text",
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
        help="make text of the tokens",
    )
    _option(group, "--logprobs", type=int, help="alternatives to report at each output token")
    _option(group, "--prompt-logprobs", type=int, help="the same for the prompt's tokens")
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
        help="what the text must match: one of json (a schema), regex, choice, grammar and "
        """json_object, such as '{"choice": ["yes", "no"]}'""",
    )


ENGINE_KEYS = (
    "model",
    "tokenizer",
    "revision",
    "dtype",
    "load_format",
    "max_model_len",
    "enable_relay_attention",
    "backend",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_prefill_ahead",
    "num_decode_steps",
    "num_pages",
    "kv_cache_dtype",
    "page_size",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "swap_space",
    "preemption",
    "max_logprobs",
    "tensor_parallel_size",
    "seed",
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


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, by their names in `rjax.config`."""
    return {key: vars(arguments)[key] for key in ENGINE_KEYS if key in arguments}


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


def _option(group: Any, *names: str, **settings: Any) -> None:
    group.add_argument(*names, default=argparse.SUPPRESS, **settings)


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
