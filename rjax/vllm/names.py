"""Arguments, fields and methods of vLLM's Python API that rjax lacks, with the reason for each."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from rjax.errors import InvalidRequestError

NO_ADAPTERS = "adapters are not supported; merge them into the weights"
TEXT_ONLY = "models take text only"
_BY_ONE = "the engine runs in one process, without workers to call"
_NO_CODE = (
    "no code runs for each token; use logit_bias, allowed_token_ids, bad_words or "
    "structured_outputs"
)
_STRUCTURED = "give structured_outputs=StructuredOutputsParams(...)"

ARGUMENTS: dict[str, str] = {
    "chat_template_content_format": "the form of the content follows from the template",
    "concurrency_limit": "all prompts are searched at once; max_num_seqs limits the batch",
    "guided_options_request": _STRUCTURED,
    "lora_request": NO_ADAPTERS,
    "mm_processor_kwargs": TEXT_ONLY,
    "multi_modal_data": TEXT_ONLY,
    "multi_modal_uuids": TEXT_ONLY,
    "prompt_adapter_request": NO_ADAPTERS,
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
    "temperature": (0, 0.0),
}

RESET_ARGUMENTS: dict[str, str] = {
    "reset_connector": "there is no KV connector",
    "reset_running_requests": "running requests keep their KV; abort them first",
}
"""Arguments of `LLM.reset_prefix_cache`."""

ENGINE_ARGUMENTS: dict[str, str] = {
    "enable_multiprocessing": "AsyncLLM(engine_process=True) has its engine in a process",
    "stat_loggers": "stats() has the figures",
}
"""Arguments of `LLMEngine.from_engine_args`."""

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
    "logits_processors": _NO_CODE,
    "truncate_prompt_tokens": "cut the prompt's token ids",
    "use_beam_search": "call LLM.beam_search",
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
    "include_stop_str_in_output": "a beam ends by a token, which its text has if it is no special "
    "token",
    "structured_outputs": "beams are not constrained",
    "temperature": "beams are compared by the model's own probabilities",
}
"""Fields of `BeamSearchParams`."""

METHODS: dict[str, str] = {
    "apply_model": _BY_ONE,
    "classify": "no supported model family pools",
    "collective_rpc": _BY_ONE,
    "get_metrics": "stats() has the figures",
    "pause_generation": "call pause(mode)",
    "resume_generation": "call resume()",
    "reward": "no supported model family pools",
    "start_profile": "use jax.profiler.start_trace",
    "stop_profile": "use jax.profiler.stop_trace",
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
