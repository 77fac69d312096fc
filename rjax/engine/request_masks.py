"""The token masks of a request: those that it brings, or those of its parameters."""

import threading
from collections.abc import Sequence as Rows
from typing import no_type_check

import numpy as np
from jaxtyping import UInt32

from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.batch.sequence import Sequence, SequenceStatus
from rjax.batch.token_mask import TokenMask, read_bitmask
from rjax.engine.bad_words import bad_words_masks
from rjax.engine.mask_threads import MaskThreads
from rjax.errors import InvalidRequestError
from rjax.sampling import SamplingParams
from rjax.structured.compiler import GrammarCompiler
from rjax.structured.mask_request import MaskRequest
from rjax.tokenization import Tokenizer

_PATIENCE = 0.02  # seconds that a step waits for masks


class RequestMasks:
    """Makes token masks for one engine.

    Args:
        tokenizer: the engine's tokenizer; None where it serves token ids only.
        vocab_size: width of the logits.
        eos_token_ids: ids that end a sequence.

    Attributes:
        failures, wait_for_any, close: see `MaskThreads`.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._lock = threading.Lock()
        self._grammars: GrammarCompiler | None = None  # made for the first constraint
        self._threads = MaskThreads()
        self._sampled: list[tuple[Sequence, int]] = []
        self.failures = self._threads.failures
        self.wait_for_any = self._threads.wait_for_any
        self.close = self._threads.close
        self._cache_limits: tuple[int, float, float, float] | None = None

    @no_type_check  # user input is checked by hand, with readable messages
    def of_request(self, params: SamplingParams, masks: Rows[TokenMask]) -> Rows[TokenMask]:
        """One mask per sample, or none.

        Args:
            params: the request's parameters.
            masks: the masks that the caller gave.

        Raises:
            InvalidRequestError: a wrong number of masks, a mask that is not usable, or masks beside
                ``bad_words``; also the errors of `structured`.
        """
        if len(masks) not in (0, params.num_sequences):
            raise InvalidRequestError(
                f"{len(masks)} masks for {params.num_sequences} samples; give one a sample"
            )
        if params.bad_words:
            if masks:
                raise InvalidRequestError("bad_words and masks exclude one another; give one")
            masks = bad_words_masks(params, self._tokenizer, self._vocab_size, self._eos)
        for mask in masks:
            read_bitmask(mask, self._vocab_size)
        if params.structured_outputs is not None and not masks:
            masks = self.structured(params)
        return masks

    def advance(self, sequence: Sequence, token: int) -> None:
        """Advance a sequence's mask by a token, now or, where it may be slow, after `post`."""
        assert sequence.mask is not None
        if getattr(sequence.mask, "may_be_slow", False):
            self._sampled.append((sequence, token))
        else:
            sequence.mask.accept(token)

    def post(self) -> None:
        """Let threads advance the slow masks of a step."""
        if self._sampled:
            self._threads.post(self._sampled)
            self._sampled = []

    def wait(self, batch: Rows[ScheduledSequence]) -> None:
        """Wait for the slow masks of a step, but not for long."""
        self._threads.wait([item.sequence for item in batch], _PATIENCE)

    def of_step(
        self, batch: Rows[ScheduledSequence]
    ) -> tuple[dict[int, UInt32[np.ndarray, " W"]], list[tuple[str, Exception]], list[int]]:
        """The masks' bitmasks now, by row, the requests whose masks fail with their errors, and the
        rows whose masks are not ready."""
        late: list[int] = []
        found: dict[int, UInt32[np.ndarray, " W"]] = {}
        failed: list[tuple[str, Exception]] = []
        for row, item in enumerate(batch):
            sequence = item.sequence
            if sequence.mask is None or not item.samples:
                continue
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if sequence.mask_pending:
                late.append(row)
                continue
            try:
                found[row] = read_bitmask(sequence.mask, self._vocab_size)
            except Exception as error:  # in its mask: only this request ends
                failed.append((sequence.request_id, error))
        return found, failed, late

    def structured(
        self, params: SamplingParams, wanted: MaskRequest | None = None
    ) -> list[TokenMask]:
        """The masks of a constraint, one per sample; none without. Any thread may call this.

        Args:
            params: the request's parameters.
            wanted: the constraint; None takes ``params.structured_outputs``.

        Raises:
            InvalidRequestError: the constraint is not valid, or it needs a tokenizer and there is
                none.
            InvalidConfigError: the package that makes masks is not installed.
        """
        if wanted is None and params.structured_outputs is not None:
            wanted = MaskRequest(params.structured_outputs.constraint)
        if wanted is None:
            return []
        return [*self._compiler().masks(wanted, params.num_sequences)]

    def limit_cache(
        self, size: int, num_bytes: float, total_bytes: float, idle_seconds: float
    ) -> None:
        """See `GrammarCompiler.limit_cache`; any thread may call this."""
        with self._lock:
            self._cache_limits = size, num_bytes, total_bytes, idle_seconds
            if self._grammars is not None:
                self._grammars.limit_cache(*self._cache_limits)

    def _compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._grammars is None:
                if self._tokenizer is None:
                    raise InvalidRequestError(
                        "structured_outputs needs a tokenizer, and this engine was made without one"
                    )
                self._grammars = GrammarCompiler(self._tokenizer, self._vocab_size)
                if self._cache_limits is not None:
                    self._grammars.limit_cache(*self._cache_limits)
            return self._grammars
