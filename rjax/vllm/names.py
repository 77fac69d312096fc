"""Arguments, fields and methods of vLLM's Python API that rjax lacks, with the reason for each."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from rjax.errors import InvalidRequestError

NO_ADAPTERS = "adapters are not supported; merge them into the weights"
TEXT_ONLY = "models take text only"
ONE_PROCESS = "the engine runs in one process, without workers to call"
NO_POOLING = "no supported model family pools"
STATS = "stats() has the figures"
NO_CODE = (
    "no code runs for each token; use logit_bias, allowed_token_ids, bad_words or "
    "structured_outputs"
)
_PREFIXES = "all requests share cached prefixes; add_prefix keeps one"
_UNPARSED = "constraints hold from the first token; 'rjax serve' parses reasoning"
_LOGPS = "LLM.get_per_token_logps has the log-probabilities of given tokens"
_REQUESTS = "use LLM.stream, or LLMEngine.add_request and step"
_STRUCTURED = "give structured_outputs=StructuredOutputsParams(...)"

ARGUMENTS: dict[str, str] = {
    "chat_template_content_format": "the form of the content follows from the template",
    "concurrency_limit": "all prompts are searched at once; max_num_seqs limits the batch",
    "data_parallel_rank": "there is one engine; 'rjax serve --replicas N' has more",
    "guided_options_request": _STRUCTURED,
    "kv_hints": _PREFIXES,
    "lora_request": NO_ADAPTERS,
    "mm_processor_kwargs": TEXT_ONLY,
    "multi_modal_data": TEXT_ONLY,
    "multi_modal_uuids": TEXT_ONLY,
    "prompt_adapter_request": NO_ADAPTERS,
    "prompt_text": "give {'prompt': text, 'prompt_token_ids': ids} as the prompt",
    "reasoning_ended": _UNPARSED,
    "reasoning_parser_kwargs": _UNPARSED,
    "session_id": _PREFIXES,
    "tokenization_kwargs": "tokenise the prompt yourself and give its token ids",
    "trace_headers": "requests are not traced; /metrics has figures",
}
"""Arguments of `LLM.generate` and the other methods that take prompts."""

_ALLOWED: dict[str, tuple[Any, ...]] = {  # values that ask for what happens anyway
    "chat_template_content_format": ("auto",),
    "backend": ("auto", "guidance"),
    "disable_any_whitespace": (True,),
    "disable_fallback": (True,),
    "flat_logprobs": (True,),
    "prompt_logprob_start": (0,),
    "routed_experts_prompt_start": (0,),
    "skip_clone": (True,),
    "skip_special_tokens": (True,),
    "start_engine_loop": (True,),
    "stream_interval": (1,),
    "temperature": (0, 0.0),
}

RESET_ARGUMENTS: dict[str, str] = {
    "reset_connector": "there is no KV connector",
    "reset_running_requests": "running requests keep their KV; abort them first",
}
"""Arguments of `LLM.reset_prefix_cache`."""

ENGINE_ARGUMENTS: dict[str, str] = {
    "enable_multiprocessing": "AsyncLLM(engine_process=True) has its engine in a process",
    "start_engine_loop": "the first request starts the engine",
    "stat_loggers": STATS,
}
"""Arguments of `LLMEngine.from_engine_args` and `AsyncLLM.from_engine_args`."""

PROMPT_KEYS: dict[str, str] = {
    "cache_salt": "give cache_salt to generate, for all of its prompts",
    "mm_processor_kwargs": TEXT_ONLY,
    "multi_modal_data": TEXT_ONLY,
    "multi_modal_uuids": TEXT_ONLY,
    "prompt_embeds": TEXT_ONLY,
    "encoder_prompt": "no supported model has an encoder",
    "decoder_prompt": "no supported model has an encoder",
}
"""Keys of a prompt that is a mapping."""

SAMPLING_FIELDS: dict[str, str] = {
    "flat_logprobs": "True has no effect: log-probabilities are always in flat lists",
    "extra_args": "there are no plug-ins that read it",
    "guided_decoding": _STRUCTURED,
    "logits_processors": NO_CODE,
    "logprob_token_ids": _LOGPS,
    "prompt_logprob_start": "prompt_logprobs are of the whole prompt",
    "prompt_logprob_token_ids": _LOGPS,
    "repetition_detection": "use max_tokens or a penalty",
    "routed_experts_prompt_start": "the experts of tokens are not returned",
    "skip_clone": "True has no effect: a request keeps a copy of its parameters",
    "skip_reading_prefix_cache": "give the request a cache_salt that no other has",
    "stream_interval": "num_decode_steps of the engine makes larger parts",
    "thinking_token_budget": "max_tokens limits reasoning and answer together",
    "trace_decode_token_ids": _LOGPS,
    "truncate_prompt_tokens": "cut the prompt's token ids",
    "use_beam_search": "call LLM.beam_search",
    "watermarking": "tokens are not watermarked",
}
"""Fields of `SamplingParams`."""

STRUCTURED_FIELDS: dict[str, str] = {
    "backend": "llguidance compiles every grammar",
    "disable_additional_properties": "say it in the schema",
    "disable_any_whitespace": "JSON never has white space that it does not need",
    "disable_fallback": "there is one compiler",
    "structural_tag": "give a grammar, or tools",
    "whitespace_pattern": "JSON never has white space that it does not need",
}
"""Fields of `StructuredOutputsParams`."""

BEAM_FIELDS: dict[str, str] = {
    "allowed_token_ids": "beams are not constrained",
    "include_stop_str_in_output": "a beam ends by a token, which its text has if it is no special "
    "token",
    "structured_outputs": "beams are not constrained",
    "skip_special_tokens": "True has no effect: a beam's text has no special tokens",
    "temperature": "beams are compared by the model's own probabilities",
    "watermarking": "tokens are not watermarked",
}
"""Fields of `BeamSearchParams`."""

METHODS: dict[str, str] = {
    "add_lora": NO_ADAPTERS,
    "apply_model": ONE_PROCESS,
    "check_health": "calls raise EngineDeadError once the engine has stopped",
    "classify": NO_POOLING,
    "collective_rpc": ONE_PROCESS,
    "do_log_stats": STATS,
    "enqueue": _REQUESTS,
    "enqueue_chat": _REQUESTS,
    "get_metrics": STATS,
    "get_num_unfinished_requests": "stats() has num_running and num_waiting",
    "get_world_size": "tensor_parallel_size is the number of devices",
    "init_weight_transfer_engine": "update_weights takes a trainer's arrays",
    "list_loras": NO_ADAPTERS,
    "pin_lora": NO_ADAPTERS,
    "release_kv_cache_memory": "call sleep(1), then wake_up(['weights'])",
    "remove_lora": NO_ADAPTERS,
    "reset_encoder_cache": TEXT_ONLY,
    "reset_mm_cache": TEXT_ONLY,
    "reward": NO_POOLING,
    "start_profile": "use jax.profiler.start_trace",
    "stop_profile": "use jax.profiler.stop_trace",
    "wait_for_completion": _REQUESTS,
}
"""Methods of `LLM` and `AsyncLLM`."""


class Refused:
    """A class of vLLM that can be imported, for scripts that do not use it, and not made.

    Raises:
        InvalidRequestError: always.
    """

    reason = ""

    def __init__(self, *args: object, **given: object) -> None:
        raise InvalidRequestError(f"{type(self).__name__}: {self.reason}")


class PoolingParams(Refused):
    """The parameters of embedding and classifying in vLLM."""

    reason = NO_POOLING


CONFIG_CLASSES: dict[str, str] = {
    "CompilationConfig": "use the options warmup and compilation_cache_dir",
    "KVTransferConfig": "KV is sent to no other engine",
    "PoolerConfig": NO_POOLING,
    "ProfilerConfig": "profile with jax.profiler",
    "StructuredOutputsConfig": "leave it out; llguidance compiles every grammar",
    "VllmConfig": "rjax.config.EngineConfig has the options",
    "WeightTransferConfig": "LLM.update_weights takes a trainer's arrays",
}
"""Classes of ``vllm.config``, which can be imported from `rjax.config` and not made."""


@functools.cache
def config_class(name: str) -> type[Refused]:
    """One of `CONFIG_CLASSES`."""
    return type(name, (Refused,), {"reason": CONFIG_CLASSES[name]})


def is_off(value: object) -> bool:
    """Whether an argument's value asks for nothing."""
    return value is None or value is False or (isinstance(value, list | dict | tuple) and not value)


def refuse_arguments(call: str, given: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Refuse arguments of a call that it does not have, unless they ask for nothing.

    Args:
        call: name of the call.
        given: the arguments that it does not have.
        known: vLLM's arguments, with what takes the place of each.

    Raises:
        InvalidRequestError: vLLM has the argument.
        TypeError: vLLM has no such argument either.
    """
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        if not is_off(value) and value not in _ALLOWED.get(name, ()):
            raise InvalidRequestError(f"{call} has no {name}: {known[name]}")


def with_refusals[C: type](known: Mapping[str, str]) -> Callable[[C], C]:
    """Class decorator: lets the constructor refuse vLLM's fields by `refuse_arguments`."""

    def decorate(cls: C) -> C:
        init = cls.__init__
        names = frozenset(known)

        @functools.wraps(init)
        def explained(self: Any, *args: Any, **given: Any) -> None:
            if not names.isdisjoint(given):
                refused = {name: given.pop(name) for name in names.intersection(given)}
                refuse_arguments(cls.__name__, refused, known)
            init(self, *args, **given)

        cls.__init__ = explained
        return cls

    return decorate


def missing_attribute(owner: object, name: str) -> AttributeError:
    """The error about an attribute that a class lacks, with the reason if vLLM has it."""
    kind = type(owner).__name__
    if name in METHODS:
        return AttributeError(f"{kind}.{name} is not supported: {METHODS[name]}")
    return AttributeError(f"{kind!r} object has no attribute {name!r}")
