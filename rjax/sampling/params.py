"""SamplingParams, with the names and defaults of vLLM."""

import dataclasses
import enum
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast, no_type_check

from rjax.config.logprobs_mode import LogprobsMode, check_logprobs_mode
from rjax.config.sampling_limits import LIMITS
from rjax.errors import InvalidRequestError, near_miss
from rjax.sampling import checks
from rjax.sampling.structured_outputs import EXCLUDED, StructuredOutputsParams
from rjax.vllm.names import SAMPLING_FIELDS, with_refusals

type SamplerMode = Literal["greedy", "random", "full"]

_GREEDY_BELOW = 1e-5
_LOWEST_TEMPERATURE = 0.01
_INT32_MAX = 2**31 - 1


class RequestOutputKind(enum.Enum):
    """Which part of the generated text and tokens each output of a request holds."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """Only the part generated since the last output."""
    FINAL_ONLY = 2
    """A single output when the request has finished."""


def _settable[C: type](cls: C) -> C:
    """Class decorator: lets fields be set as in vLLM, with the checks of the constructor."""
    names = [field.name for field in dataclasses.fields(cls)]

    def set_checked(self: Any, name: str, value: Any) -> None:
        if name not in names:
            raise InvalidRequestError(
                f"unknown sampling parameter {name!r}; {near_miss(name, names)}"
            )
        changed = dataclasses.replace(self, **{name: value})
        for each in names:
            object.__setattr__(self, each, getattr(changed, each))

    made: Any = cls
    made.__setattr__ = set_checked
    return cls


@no_type_check  # ``__post_init__`` checks the values, with messages for users
@_settable
@with_refusals(SAMPLING_FIELDS)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request; the constructor checks and normalises the values.

    A field may be set later, with the same checks; requests that were given the parameters before
    keep the former values.

    Attributes:
        n: samples of the prompt, 1 to 16384; greedy requests have one.
        best_of: samples to generate, ``n`` to 16384. The ``n`` with the highest sum of
            log-probabilities are returned, best first. None generates ``n``. It cannot be streamed
            as DELTA; a CUMULATIVE output holds the best samples so far.
        presence_penalty: -2 to 2, subtracted from the logit of every generated token.
        frequency_penalty: -2 to 2, subtracted from a token's logit once per occurrence in the
            output.
        repetition_penalty: 0.01 to 100, divides positive and multiplies negative logits of tokens
            in the prompt or the output; 1 is off.
        temperature: 0 to 2. Below 1e-5, sampling is greedy, and ``top_p``, ``top_k`` and ``min_p``
            are off. From 1e-5 to 0.01 it is raised to 0.01, with a warning.
        top_p: above 0, up to 1: sample from the smallest set of most likely tokens with this much
            probability.
        top_k: sample from the k most likely tokens and those that tie with the last of them; 0 or
            -1 is off.
        min_p: 0 to 1: sample from tokens with at least this fraction of the highest probability.
        seed: -2**63 to 2**63-1. The same seed gives the same tokens, independent of the batch. None
            or -1 draws a random seed.
        stop: up to 16 strings that end the text; stored as a tuple.
        stop_token_ids: up to 64 token ids that end the sequence; stored as a tuple.
        ignore_eos: continue after the model's end-of-sequence token.
        max_tokens: most tokens to generate; None is up to the model's length.
        min_tokens: suppress end-of-sequence and stop tokens before this many tokens.
        logprobs: alternatives to report with each token's log-probability. 0 reports only the
            chosen token, -1 the whole vocabulary, None nothing.
        logprobs_mode: the distribution of ``logprobs``, their order, ranks and sum: "raw_logprobs"
            is the softmax of the model's logits, "processed_logprobs" the distribution that the
            token is sampled from, after masks, bias, penalties, temperature and truncation; tokens
            outside it have -inf. A greedy token's is that of temperature 1, without truncation.
            None is the engine's ``logprobs_mode``.
        prompt_logprobs: the same as ``logprobs`` for the prompt's tokens, always raw.
        detokenize: convert tokens to text; stop strings need it.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: put spaces between special tokens in the text.
        include_stop_str_in_output: keep the stop string at the end of the text.
        output_kind: what each output of a running request holds.
        logit_bias: up to 1024 token ids, each with a number to add to its logit, clamped to
            [-100, 100].
        allowed_token_ids: only these tokens may be generated; None allows all.
        bad_words: up to 128 words that are not generated: the last token of a word is forbidden
            after its other tokens. Stored as a tuple, or None.
        structured_outputs: what the text must match: a JSON schema, a regex, a grammar, a choice.

    Raises:
        InvalidRequestError: a value has the wrong type, is not finite or out of range, or
            contradicts another value.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        for name in _BOOLEANS:
            self._set(name, checks.boolean(name, getattr(self, name)))
        if not isinstance(self.output_kind, RequestOutputKind):
            kinds = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
            checks.refuse("output_kind", self.output_kind, f"give one of {kinds}")
        if self.logprobs_mode is not None:
            check_logprobs_mode(self.logprobs_mode, InvalidRequestError)
        self._check_together()
        self._normalise_temperature()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for name, (low, high, note) in _INTEGERS.items():
            self._set(name, checks.integer(name, getattr(self, name), low, high, note=note))
        for name, (low, high, note) in _OPTIONAL_INTEGERS.items():
            if getattr(self, name) is not None:
                self._set(name, checks.integer(name, getattr(self, name), low, high, note=note))
        for name, (low, high, note) in _REALS.items():
            value = checks.real(
                name, getattr(self, name), low, high, above_low=name == "top_p", note=note
            )
            self._set(name, value)
        if self.top_k == -1:
            self._set("top_k", 0)
        if self.seed == -1:
            self._set("seed", None)

    def _check_lists(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", _checked_texts("stop", stop, LIMITS.stop_strings))
        self._set(
            "bad_words", _checked_texts("bad_words", self.bad_words, LIMITS.bad_words) or None
        )
        if self.stop_token_ids is not None:
            ids = checks.token_ids("stop_token_ids", self.stop_token_ids, LIMITS.stop_token_ids)
            self._set("stop_token_ids", ids)
        else:
            self._set("stop_token_ids", ())
        if self.allowed_token_ids is not None:
            ids = checks.token_ids(
                "allowed_token_ids", self.allowed_token_ids, LIMITS.allowed_token_ids
            )
            if not ids:
                checks.refuse("allowed_token_ids", [], "name at least one token id, or give None")
            self._set("allowed_token_ids", ids)
        if self.logit_bias is not None:
            self._set("logit_bias", _checked_bias(self.logit_bias))

    def _check_together(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(
                f"best_of is {self.best_of} and n {self.n}; give a best_of that is not below n"
            )
        if self.num_sequences > self.n and self.output_kind == RequestOutputKind.DELTA:
            raise InvalidRequestError(
                f"best_of is {self.best_of}, and which samples are the best is known at the end; "
                "do not stream, or set best_of to n"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; give a "
                "min_tokens that is not above max_tokens"
            )
        wanted = self.structured_outputs
        if wanted is not None:
            if not isinstance(wanted, StructuredOutputsParams):
                checks.refuse("structured_outputs", wanted, "give a StructuredOutputsParams")
            for name in EXCLUDED:
                if getattr(self, name):
                    raise InvalidRequestError(
                        f"{name} contradicts structured_outputs; give one of them"
                    )
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                "stop strings are searched in the text, and detokenize is False; set detokenize to "
                "True or use stop_token_ids"
            )

    def _normalise_temperature(self) -> None:
        if self.temperature < _GREEDY_BELOW:
            name, count = ("n", self.n) if self.n > 1 else ("best_of", self.num_sequences)
            if count > 1:
                raise InvalidRequestError(
                    f"{name} is {count} with greedy sampling, which gives {count} times the same; "
                    f"set {name} to 1 or a temperature above 0"
                )
            for name, neutral in (
                ("temperature", 0.0),
                ("top_p", 1.0),
                ("top_k", 0),
                ("min_p", 0.0),
            ):
                self._set(name, neutral)
        elif self.temperature < _LOWEST_TEMPERATURE:
            warnings.warn(
                f"temperature {self.temperature:g} is raised to {_LOWEST_TEMPERATURE}; give 0 "
                "for greedy sampling",
                stacklevel=5,  # the caller of the constructor
            )
            self._set("temperature", _LOWEST_TEMPERATURE)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "SamplingParams":
        """Build from a mapping, as the command line and the server have it.

        JSON's forms are taken too: ``null`` for a parameter that cannot be None means its default,
        keys of ``logit_bias`` may be digits in a string, ``output_kind`` may be a name,
        ``structured_outputs`` may be a mapping.

        Raises:
            InvalidRequestError: an unknown key (the message names the nearest valid one), or a
                value that the constructor refuses.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        given: dict[str, Any] = {}
        for key, value in options.items():
            if key not in fields:
                near = near_miss(key, fields)
                raise InvalidRequestError(f"unknown sampling parameter {checks.shown(key)}; {near}")
            if value is None and key not in _NULLABLE:
                continue
            given[key] = value
        bias = given.get("logit_bias")
        if isinstance(bias, Mapping):
            given["logit_bias"] = {_json_key(key): value for key, value in bias.items()}
        wanted = given.get("structured_outputs")
        if isinstance(wanted, Mapping):
            given["structured_outputs"] = StructuredOutputsParams.from_options(wanted)
        kind = given.get("output_kind")
        if isinstance(kind, str) and kind.upper() in RequestOutputKind.__members__:
            given["output_kind"] = RequestOutputKind[kind.upper()]
        return cls(**given)

    def clone(self) -> "SamplingParams":
        """A copy, which later changes of this object do not reach."""
        made = object.__new__(type(self))
        for field in dataclasses.fields(self):
            object.__setattr__(made, field.name, getattr(self, field.name))
        return made

    @property
    def num_sequences(self) -> int:
        """Samples that are generated."""
        return self.n if self.best_of is None else self.best_of

    def each_sequence(self) -> "SamplingParams":
        """The parameters of one sample, with log-probabilities where the best are chosen."""
        if self.num_sequences == self.n:
            return self
        logprobs = 0 if self.logprobs is None else self.logprobs
        return dataclasses.replace(self, n=self.num_sequences, best_of=None, logprobs=logprobs)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as normalised."""
        return cast(tuple[str, ...], self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as normalised."""
        return cast(tuple[int, ...], self.stop_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether sampling always takes the most likely token."""
        return self.temperature == 0.0

    @property
    def processed_logprobs(self) -> bool:
        """Whether the log-probabilities are those of the distribution that is sampled from."""
        return self.logprobs_mode == "processed_logprobs"

    @property
    def sampler_mode(self) -> SamplerMode:
        """The cheapest sampler mode that serves this request.

        "greedy" is the argmax of the raw logits, "random" adds temperature, "full" supports every
        parameter.
        """
        if (
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.top_k
            or self.top_p < 1.0
            or self.min_p
        ):
            return "full"
        return "greedy" if self.greedy else "random"

    def suppressed_ids(self, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """The ids that are suppressed until ``min_tokens``."""
        eos = () if self.ignore_eos else tuple(eos_token_ids)
        return tuple(dict.fromkeys((*self.stop_ids, *eos)))

    def check_model(
        self, vocab_size: int, max_logprobs: int, eos_token_ids: Iterable[int] = ()
    ) -> None:
        """Check the parameters against the model.

        Args:
            vocab_size: width of the model's logits, not the tokenizer's length.
            max_logprobs: maximum of alternatives per token.
            eos_token_ids: end-of-sequence ids in the model's configuration.

        Raises:
            InvalidRequestError: a token id is not below ``vocab_size``, there are too many
                log-probabilities or ids that end the sequence, or ``min_tokens`` leaves no token to
                sample.
        """
        suppressed = self.suppressed_ids(eos_token_ids)
        if len(suppressed) > LIMITS.suppressed:
            raise InvalidRequestError(
                f"{len(suppressed)} token ids end this sequence; give at most {LIMITS.suppressed} "
                "in stop_token_ids and the model's eos_token_id together"
            )
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            ids = getattr(self, name) or ()
            if len(ids) and (highest := max(ids)) >= vocab_size:
                raise InvalidRequestError(
                    f"{name} holds token id {highest}; this model has {vocab_size} ids, 0 to "
                    f"{vocab_size - 1}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            number = vocab_size if asked == -1 else asked
            if number is not None and number > min(max_logprobs, vocab_size):
                meaning = f" (the whole vocabulary, {vocab_size})" if asked == -1 else ""
                raise InvalidRequestError(
                    f"{name} is {asked}{meaning}; this engine gives at most "
                    f"{min(max_logprobs, vocab_size)}: ask for less, or raise max_logprobs up to "
                    f"{vocab_size}"
                )
        if self.min_tokens:
            ends = {i for i in suppressed if i < vocab_size}
            allowed = self.allowed_token_ids
            if len(ends) == vocab_size or (allowed is not None and ends.issuperset(allowed)):
                raise InvalidRequestError(
                    f"min_tokens is {self.min_tokens}, but every allowed token ends the sequence; "
                    "allow another token or set min_tokens to 0"
                )


def step_mode(modes: Iterable[SamplerMode]) -> SamplerMode:
    """The cheapest mode that serves every request of a step; "greedy" for an empty step."""
    needed = set(modes)
    return "full" if "full" in needed else "random" if "random" in needed else "greedy"


def _checked_texts(name: str, texts: Any, most: int) -> tuple[str, ...]:
    if texts is None:
        return ()
    remedy = f"give a list of strings of 1 to {LIMITS.stop_string_chars} characters"
    found = checks.sequence(name, texts, most, remedy)
    for i, text in enumerate(found):
        if not isinstance(text, str) or not 1 <= len(text) <= LIMITS.stop_string_chars:
            checks.refuse(f"{name}[{i}]", text, remedy)
    return tuple(dict.fromkeys(found))


def _checked_bias(bias: Any) -> dict[int, float] | None:
    if not isinstance(bias, Mapping):
        checks.refuse("logit_bias", bias, "give a mapping from token id to a number")
    if len(bias) > LIMITS.logit_bias:
        raise InvalidRequestError(
            f"logit_bias has {len(bias)} entries; give at most {LIMITS.logit_bias}"
        )
    checked = {}
    for key, value in bias.items():
        token = checks.integer("a key of logit_bias", key, 0, _INT32_MAX)
        number = checks.real(f"logit_bias[{token}]", value, -_INT32_MAX, _INT32_MAX)
        checked[token] = min(max(number, -100.0), 100.0)
    return checked or None


def _json_key(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= 10 else key


_INTEGERS = {
    "n": (1, LIMITS.n, ""),
    "top_k": (-1, _INT32_MAX, "; 0 or -1 keeps every token"),
    "min_tokens": (0, _INT32_MAX, ""),
}
_OPTIONAL_INTEGERS = {
    "best_of": (1, LIMITS.n, ", or None for n"),
    "seed": (-(2**63), 2**63 - 1, ", or None for a fresh one"),
    "max_tokens": (1, _INT32_MAX, ", or None for up to the model's length"),
    "logprobs": (-1, _INT32_MAX, ", or None for no log-probabilities"),
    "prompt_logprobs": (-1, _INT32_MAX, ", or None for no log-probabilities"),
}
_REALS = {
    "presence_penalty": (-2.0, 2.0, ""),
    "frequency_penalty": (-2.0, 2.0, ""),
    "repetition_penalty": (0.01, 100.0, "; 1 is off"),
    "temperature": (0.0, 2.0, "; 0 is greedy"),
    "top_p": (0.0, 1.0, "; 1 keeps every token"),
    "min_p": (0.0, 1.0, "; 0 keeps every token"),
}
_BOOLEANS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
_NULLABLE = frozenset(
    {"best_of", "seed", "stop", "stop_token_ids", "max_tokens", "logprobs", "prompt_logprobs"}
    | {"logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "logprobs_mode"}
)
