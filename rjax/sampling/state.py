"""The sampler's state on the device: one row per running sequence (sampler slot)."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from rjax.config.sampling_limits import LIMITS
from rjax.errors import InvalidRequestError
from rjax.sampling.params import SamplingParams

_Host = np.ndarray | Array  # NumPy when made, traced inside ``admit``


@no_type_check  # JAX rebuilds it with descriptions of arrays for leaves
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class SamplingState:
    """Device arrays indexed by sampler slot; ``LIMITS`` fixes E and Z, W is ceil(V / 32).

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: see
            ``SamplingParams``.
        key: the seed, high 32 bits first. A token's random numbers depend on it and ``num_output``.
        num_output: tokens sampled so far.
        min_tokens: ``suppressed`` applies while ``num_output`` is below this.
        processed_logprobs: 1 if the row reports the distribution that it samples from, 0 if that of
            the raw logits; see ``SamplingParams.logprobs_mode``.
        suppressed: ids that end the sequence, padded with -1.
        bias_ids: distinct ids with a bias, padded with -1.
        bias_values: added to the logits of ``bias_ids``.
        allowed: bitmask of the tokens that may be sampled: bit v % 32 of word v // 32 is token v.
        in_prompt: bitmask of the prompt's tokens.
        output_counts: occurrences of each token in the output. Only steps of mode "full" update
            them; a step with a penalty always has that mode.
    """

    temperature: Float32[Array, " slots"]
    top_k: Int32[Array, " slots"]
    top_p: Float32[Array, " slots"]
    min_p: Float32[Array, " slots"]
    repetition_penalty: Float32[Array, " slots"]
    presence_penalty: Float32[Array, " slots"]
    frequency_penalty: Float32[Array, " slots"]
    key: UInt32[Array, "slots 2"]
    num_output: Int32[Array, " slots"]
    min_tokens: Int32[Array, " slots"]
    processed_logprobs: Int32[Array, " slots"]
    suppressed: Int32[Array, "slots E"]
    bias_ids: Int32[Array, "slots Z"]
    bias_values: Float32[Array, "slots Z"]
    allowed: UInt32[Array, "slots W"]
    in_prompt: UInt32[Array, "slots W"]
    output_counts: Int32[Array, "slots V"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class SlotRow:
    """One row of every field of ``SamplingState``, built on the host."""

    temperature: Float32[_Host, ""]
    top_k: Int32[_Host, ""]
    top_p: Float32[_Host, ""]
    min_p: Float32[_Host, ""]
    repetition_penalty: Float32[_Host, ""]
    presence_penalty: Float32[_Host, ""]
    frequency_penalty: Float32[_Host, ""]
    key: UInt32[_Host, "2"]
    num_output: Int32[_Host, ""]
    min_tokens: Int32[_Host, ""]
    processed_logprobs: Int32[_Host, ""]
    suppressed: Int32[_Host, " E"]
    bias_ids: Int32[_Host, " Z"]
    bias_values: Float32[_Host, " Z"]
    allowed: UInt32[_Host, " W"]
    in_prompt: UInt32[_Host, " W"]
    output_counts: Int32[_Host, " V"] | None
    """None without output: all are 0."""


FIELDS = tuple(field.name for field in dataclasses.fields(SamplingState))
_COUNTS = "output_counts"
_TOGETHER = 16  # sequences that one program admits

type Admission = Literal["one", "several", "continued"]
ADMISSIONS: tuple[Admission, ...] = ("one", "several", "continued")
"""The programs of `admit`: for a new sequence, for several, for one that has sampled already."""


def init_state(num_slots: int, vocab_size: int) -> SamplingState:
    """A state in which every slot samples greedily without restrictions."""
    empty = _empty_row(vocab_size)
    rows = {name: jnp.asarray(getattr(empty, name)) for name in FIELDS if name != _COUNTS}
    rows[_COUNTS] = jnp.zeros(vocab_size, jnp.int32)
    tiled = {name: jnp.tile(row, (num_slots,) + (1,) * row.ndim) for name, row in rows.items()}
    return SamplingState(**tiled)


def _empty_row(vocab_size: int) -> SlotRow:
    return slot_row(
        SamplingParams(temperature=0.0),
        seed=0,
        prompt_token_ids=(),
        output_token_ids=(),
        eos_token_ids=(),
        vocab_size=vocab_size,
    )


def slot_row(
    params: SamplingParams,
    *,
    seed: int,
    prompt_token_ids: Sequence[int] | np.ndarray,
    output_token_ids: Sequence[int] | np.ndarray,
    eos_token_ids: Iterable[int],
    vocab_size: int,
) -> SlotRow:
    """The row of a new sequence, or of a preempted one with its output so far.

    A preempted sequence continues exactly as it would have without preemption, because its random
    numbers depend only on the seed and the number of output tokens.

    Args:
        params: the request's parameters, checked by ``SamplingParams.check_model``.
        seed: the sequence's seed, 0 to 2**64-1 (``sequence_seed``).
        prompt_token_ids, output_token_ids: ids below ``vocab_size``.
        eos_token_ids: end-of-sequence ids in the model's configuration.
        vocab_size: width of the logits.

    Raises:
        InvalidRequestError: a token id is not below ``vocab_size``, or too many ids end the
            sequence.
    """
    ends = params.suppressed_ids(eos_token_ids)
    if len(ends) > LIMITS.suppressed:
        raise InvalidRequestError(
            f"{len(ends)} token ids end this sequence; give at most {LIMITS.suppressed} in "
            "stop_token_ids and the model's eos_token_id together"
        )
    bias = params.logit_bias or {}
    allowed = params.allowed_token_ids
    output = _ids("output_token_ids", output_token_ids, vocab_size)
    return SlotRow(
        temperature=np.array(params.temperature, np.float32),
        top_k=np.array(params.top_k, np.int32),
        top_p=np.array(params.top_p, np.float32),
        min_p=np.array(params.min_p, np.float32),
        repetition_penalty=np.array(params.repetition_penalty, np.float32),
        presence_penalty=np.array(params.presence_penalty, np.float32),
        frequency_penalty=np.array(params.frequency_penalty, np.float32),
        key=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        num_output=np.array(len(output), np.int32),
        min_tokens=np.array(params.min_tokens, np.int32),
        processed_logprobs=np.array(params.processed_logprobs, np.int32),
        suppressed=_padded(ends, LIMITS.suppressed, -1, np.int32),
        bias_ids=_padded(list(bias.keys()), LIMITS.logit_bias, -1, np.int32),
        bias_values=_padded(list(bias.values()), LIMITS.logit_bias, 0, np.float32),
        allowed=(
            _all_bits(vocab_size)
            if allowed is None
            else _bits("allowed_token_ids", allowed, vocab_size)
        ),
        in_prompt=_bits("prompt_token_ids", prompt_token_ids, vocab_size),
        output_counts=np.bincount(output, minlength=vocab_size).astype(np.int32)
        if output.size
        else None,
    )


def _admit(
    state: SamplingState, packed: UInt32[Array, "R X"], counts: Int32[Array, " V"] | None
) -> SamplingState:
    # Write every field, so that nothing remains of the slots' previous sequences.
    slots, start, fields = packed[:, 0], 1, {}
    for name in FIELDS:
        held = getattr(state, name)
        if name == _COUNTS:
            rows = jnp.int32(0) if counts is None else counts
        else:
            stop = start + math.prod(held.shape[1:])
            piece = packed[:, start:stop].reshape(-1, *held.shape[1:])
            rows, start = jax.lax.bitcast_convert_type(piece, held.dtype), stop
        fields[name] = held.at[slots].set(rows, mode="drop")
    return SamplingState(**fields)


_admit_donated = jax.jit(_admit, donate_argnums=0)


def admit(state: SamplingState, rows: Mapping[int, SlotRow]) -> SamplingState:
    """Write these rows to their slots; ``state`` is donated and must not be used again.

    Up to 16 rows are copied to the device as one array. The counts, of vocabulary size, are copied
    separately and only of sequences that have output, one by one.
    """
    num_slots = state.temperature.shape[0]
    assert all(0 <= slot < num_slots for slot in rows), f"{[*rows]} are not all of {num_slots}"
    new = [(slot, row) for slot, row in rows.items() if row.output_counts is None]
    for group in itertools.batched(new, _TOGETHER):
        state = _admit_donated(state, _packed(group, num_slots), None)
    for slot, row in rows.items():
        if row.output_counts is not None:
            state = _admit_donated(state, _packed([(slot, row)], num_slots), row.output_counts)
    return state


def lower_admission(state: Any, vocab_size: int, admission: Admission) -> jax.stages.Lowered:
    """Lower ``admit``.

    Args:
        state: a SamplingState, or its shapes and shardings.
        vocab_size: width of the logits.
        admission: which program.
    """
    num_slots = state.temperature.shape[0]
    rows = [(0, _empty_row(vocab_size))] * (2 if admission == "several" else 1)
    counts = np.zeros(vocab_size, np.int32) if admission == "continued" else None
    return _admit_donated.lower(state, _packed(rows, num_slots), counts)


def _packed(rows: Sequence[tuple[int, SlotRow]], num_slots: int) -> UInt32[np.ndarray, "R X"]:
    """The slots and fields of rows; R is 1 or 16, so that two programs serve."""
    number = 1 if len(rows) == 1 else _TOGETHER
    names = [name for name in FIELDS if name != _COUNTS]
    size = 1 + sum(getattr(rows[0][1], name).size for name in names)
    packed = np.empty((number, size), np.uint32)
    packed[:, 0] = num_slots  # no slot: dropped
    for line, (slot, row) in zip(packed, rows, strict=False):
        line[0] = slot
        fields = [getattr(row, name).view(np.uint32).ravel() for name in names]
        np.concatenate(fields, out=line[1:])
    return packed


def _ids(name: str, ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    array = np.asarray(ids, np.int64)
    if array.size and not (array.min() >= 0 and array.max() < vocab_size):
        found = array.max() if array.max() >= vocab_size else array.min()
        raise InvalidRequestError(
            f"{name} holds token id {found}; this model has {vocab_size} ids, 0 to {vocab_size - 1}"
        )
    return array


def _bits(name: str, ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Bit v % 32 of word v // 32 set for every id v."""
    member = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    member[_ids(name, ids, vocab_size)] = True
    return np.packbits(member, bitorder="little").view("<u4").astype(np.uint32)


def _all_bits(vocab_size: int) -> np.ndarray:
    """Bits of every id below ``vocab_size``."""
    bitmask = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    bitmask[-1] >>= np.uint32(-vocab_size % 32)
    return bitmask


def _padded(values: Sequence[float], size: int, fill: float, dtype: type) -> np.ndarray:
    row = np.full(size, fill, dtype)
    row[: len(values)] = values
    return row
