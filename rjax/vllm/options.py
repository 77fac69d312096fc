"""Options of vLLM that rjax has no use for, and what takes their place.

Flags of the command line that have a meaning here are declared with the options that they set.
"""

import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rjax.errors import InvalidConfigError

ENGINE_NO_OPS = {
    "--enforce-eager": "every step is a compiled program; --warmup off compiles none ahead",
    "--enable-chunked-prefill": "prompts are always chunked (see --max-num-batched-tokens)",
    "--enable-sleep-mode": "every engine can sleep",
    "--async-scheduling": "the next step always starts before the last one's tokens are read",
    "--trust-remote-code": "rjax never runs code of a checkpoint; 'rjax models' lists the families "
    "that it has code for",
}
"""Accepted by every command that makes an engine, with the reason for having no effect."""

SERVER_NO_OPS = {
    "--enable-auto-tool-choice": "the model may always call the tools of a request",
    "--enable-prompt-tokens-details": "the usage of a response always has them",
    "--enable-server-load-tracking": "/load always has the load",
    "--disable-log-requests": "requests are logged only with --access-log",
    "--disable-uvicorn-access-log": "requests are logged only with --access-log",
}
"""Accepted by ``rjax serve`` too."""

_INSTEAD: tuple[tuple[str, str], ...] = (
    ("--pipeline-parallel-size -pp", "use --tensor-parallel-size; layers stay on all devices"),
    (
        "--data-parallel-size -dp --data-parallel-size-local -dpl --data-parallel-rank -dpn "
        "--data-parallel-start-rank -dpr --data-parallel-address -dpa --data-parallel-rpc-port "
        "-dpp --data-parallel-backend -dpb --data-parallel-hybrid-lb --data-parallel-external-lb",
        "use 'rjax serve --replicas N': that many engines behind one address",
    ),
    (
        "--enable-eplb --decode-context-parallel-size -dcp "
        "--prefill-context-parallel-size -pcp --enable-dbo",
        "use --tensor-parallel-size",
    ),
    ("--distributed-executor-backend", "leave it out; one process drives all devices of a host"),
    (
        "--nnodes --node-rank -r --master-addr --master-port --headless",
        "a server runs on one host; use --tensor-parallel-size, and --quantization if the model "
        "does not fit",
    ),
    ("--disable-custom-all-reduce", "leave it out; XLA makes the collectives"),
    (
        "--kv-cache-memory-bytes --kv-cache-memory",
        "use --num-pages (pages of --page-size tokens), or --gpu-memory-utilization",
    ),
    ("--cpu-offload-gb", "weights stay on the device; --swap-space is host memory for KV"),
    (
        "--kv-offloading-size --kv-offloading-backend --kv-transfer-config",
        "use --swap-space for KV of preempted sequences, and --prefix-file for saved prefixes",
    ),
    ("--preemption-mode", "use --preemption auto, swap or recompute"),
    ("--num-scheduler-steps --stream-interval", "use --num-decode-steps"),
    (
        "--scheduling-policy",
        "leave it out; the field 'priority' of a request orders requests of its API key",
    ),
    (
        "--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold "
        "--scheduler-delay-factor",
        "use --max-num-batched-tokens and --max-num-prefill-ahead",
    ),
    (
        "--compilation-config -cc -O --optimization-level --cudagraph-capture-sizes "
        "--cuda-graph-sizes --max-cudagraph-capture-size --max-seq-len-to-capture",
        "use --warmup (when the step sizes are compiled) and --compilation-cache-dir",
    ),
    ("--attention-backend --attention-config", "use --backend mosaic, triton or xla"),
    ("--disable-cascade-attn", "use --relay off"),
    ("--device", "set JAX_PLATFORMS, for example to cpu; 'rjax info' shows the devices"),
    ("--download-dir", "set HF_HOME, the folder of the Hugging Face cache"),
    (
        "--hf-token",
        "run 'hf auth login' or set HF_TOKEN; other users of this machine can read a command line",
    ),
    ("--tokenizer-mode", "use --tokenizer"),
    ("--tokenizer-revision --code-revision", "use --revision; it holds for all files of the model"),
    (
        "--hf-overrides --hf-config-path --config-format --rope-scaling --rope-theta --model-impl "
        "--disable-sliding-window",
        "change config.json in a copy of the model's folder",
    ),
    (
        "--task --runner --convert --pooler-config --override-pooler-config",
        "leave it out; every supported model generates, and none pools",
    ),
    (
        "--generation-config --override-generation-config",
        "the defaults are those of the model's generation_config.json; a request overrides them",
    ),
    (
        "--model-loader-extra-config --safetensors-load-strategy --ignore-patterns "
        "--pt-load-map-location --use-tqdm-on-load --max-parallel-loading-workers",
        "leave it out; weights are read from safetensors (see --load-format)",
    ),
    (
        "--enable-lora --lora-modules --max-loras --max-lora-rank --max-cpu-loras --lora-dtype "
        "--fully-sharded-loras --default-mm-loras",
        "adapters are not supported; merge them into the weights",
    ),
    (
        "--speculative-config -sc --speculative-model --num-speculative-tokens --spec-method "
        "--spec-model --spec-tokens",
        "speculative decoding is not supported; --num-decode-steps helps small batches",
    ),
    (
        "--limit-mm-per-prompt --mm-processor-kwargs --allowed-local-media-path "
        "--allowed-media-domains --media-io-kwargs --interleave-mm-strings --enable-prompt-embeds "
        "--enable-mm-embeds --mm-processor-cache-gb",
        "models take text only",
    ),
    (
        "--guided-decoding-backend --structured-outputs-config",
        "leave it out; llguidance compiles every grammar",
    ),
    (
        "--logits-processors --logits-processor-pattern --tool-parser-plugin "
        "--reasoning-parser-plugin --io-processor-plugin --middleware --worker-cls "
        "--worker-extension-cls --scheduler-cls",
        "refused: no code is loaded by its name",
    ),
    (
        "--chat-template-content-format --trust-request-chat-template",
        "use --chat-template; the form of the content follows from the template",
    ),
    ("--default-chat-template-kwargs", "send chat_template_kwargs with the requests"),
    ("--response-role", "leave it out; the role is assistant"),
    ("--enable-force-include-usage", "send stream_options with the requests"),
    (
        "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers "
        "--enable-ssl-refresh",
        "put a reverse proxy with TLS in front of the server (see --root-path)",
    ),
    (
        "--api-server-count -asc",
        "use --limit text_workers=N, the processes that tokenise",
    ),
    ("--h11-max-incomplete-event-size", "use --limit header_bytes=N"),
    ("--h11-max-header-count", "use --limit headers=N"),
    (
        "--max-log-len --enable-log-outputs --log-error-stack --log-config-file",
        "prompts and outputs are never logged; see --access-log and --uvicorn-log-level",
    ),
    (
        "--otlp-traces-endpoint --collect-detailed-traces --kv-cache-metrics",
        "scrape /metrics with Prometheus",
    ),
    (
        "--enable-trace-replay",
        "LLM.get_per_token_logps has the log-probabilities of given tokens",
    ),
    ("--profiler-config", "profile with jax.profiler"),
    (
        "--weight-transfer-config",
        "'rjax serve --enable-weight-updates' and LLM.update_weights take new weights",
    ),
    ("--shutdown-timeout", "use --drain-seconds"),
    ("--config", "give the options on the command line"),
)

INSTEAD: dict[str, str] = {flag: text for flags, text in _INSTEAD for flag in flags.split()}
"""What to do instead, by flag."""


def instead_of(flag: str) -> str | None:
    """What takes the place of a flag of vLLM, as given; None for other flags.

    The forms ``--flag=value``, ``--no-flag``, ``--flag.key`` and ``-O3`` count as the flag.
    """
    name = flag.split("=")[0].split(".")[0]
    if name[:2] == "-O":
        name = "-O"
    known = {**INSTEAD, **ENGINE_NO_OPS, **SERVER_NO_OPS}
    return known.get(name) or known.get(name.replace("--no-", "--", 1))


def _as_option(found: re.Match[str]) -> str:
    if found[1] is None:  # quoted: a command
        return found[0]
    name = found[1].replace("-", "_")
    return _OPTION_OF_FLAG.get(name, name)


def _of_options(text: str) -> str:
    """A text about flags, with the names of the options in their place."""
    return re.sub(r"'[^']*'|--([a-z][a-z-]*)", _as_option, text)


_OPTION_OF_FLAG = {"relay": "enable_relay_attention"}

OPTION_NO_OPS: dict[str, str] = {
    **{_of_options(flag): _of_options(why) for flag, why in ENGINE_NO_OPS.items()},
    "config_format": "the config is Hugging Face's config.json",
    "convert": "models are used as they are",
    "disable_custom_all_reduce": "XLA makes the collectives",
    "disable_log_stats": "nothing is logged; LLM.stats() has the figures",
    "distributed_executor_backend": "one process drives all devices of a host",
    "enable_log_requests": "nothing is logged",
    "generation_config": "the defaults are those of the model's generation_config.json",
    "guided_decoding_backend": "llguidance compiles every grammar",
    "language_model_only": "models take text only",
    "max_parallel_loading_workers": "weights are read in parallel anyway",
    "runner": "every supported model generates, and none pools",
    "scheduling_policy": "requests run by their priority, then in the order of arrival",
    "served_model_name": "only a server's model has a name; see 'rjax serve'",
    "structured_outputs_config": "llguidance compiles every grammar",
    "task": "every supported model generates, and none pools",
    "tokenizer_mode": "the files of the tokenizer decide",
    "use_tqdm_on_load": "use_tqdm shows or hides all progress bars",
}
"""Options of vLLM's Python classes that are accepted, with the reason for having no effect."""

_ALLOWED: dict[str, tuple[object, ...]] = {  # values; without an entry, all
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "generation_config": ("auto",),
    "runner": ("auto", "generate"),
    "scheduling_policy": ("fcfs", "priority"),
    "structured_outputs_config": ({"backend": "auto"}, {"backend": "guidance"}),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf", "slow"),
}
_OFF: dict[str, object] = {  # besides None, False and what is empty
    "cpu_offload_gb": 0,
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "nnodes": 1,
    "num_scheduler_steps": 1,
    "pipeline_parallel_size": 1,
}
_OTHER_NAMES = {"block_size": "page_size", "num_gpu_blocks_override": "num_pages"}


def own_options(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Options of a Python class without those of vLLM that have no effect, by rjax's names.

    An option without effect gives a warning, unless its value says that it is off.

    Args:
        options: the options as given.
        known: names of rjax's options; other unknown names stay too.

    Raises:
        InvalidConfigError: an option of vLLM is not supported, with what takes its place; or it is
            given under both names.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        own = _OTHER_NAMES.get(name, name)
        if own in known:
            if own in found:
                raise InvalidConfigError(f"{own} is given twice, also as {name!r}; give it once")
            found[own] = value
        elif _is_off(name, value):
            if name not in OPTION_NO_OPS and _instead(name) is None:
                found[name] = value
        elif name in OPTION_NO_OPS and value in _ALLOWED.get(name, (value,)):
            text = f"{name} has no effect: {OPTION_NO_OPS[name]}"
            warnings.warn(text, skip_file_prefixes=(str(Path(__file__).parent),))
        elif (instead := _instead(name)) is not None:
            raise InvalidConfigError(f"{name} is {value!r}: {instead}")
        else:
            found[name] = value
    return found


def _is_off(name: str, value: object) -> bool:
    empty = isinstance(value, str | list | tuple | dict) and not value
    return value is None or value is False or empty or (name in _OFF and value == _OFF[name])


def _instead(name: str) -> str | None:
    """What takes the place of an option of vLLM's Python classes; None for other names."""
    if name in _ALLOWED:
        allowed = ", ".join(map(repr, _ALLOWED[name]))
        return f"{OPTION_NO_OPS[name]}; give one of {allowed}, or leave it out"
    text = INSTEAD.get("--" + name.replace("_", "-"))
    return text and _of_options(text)
