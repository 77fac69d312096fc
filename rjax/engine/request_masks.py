"""The token masks of a request: those that it brings, or those of its parameters."""

import threading
from collections.abc import Sequence
from typing import no_type_check

import numpy as np
from jaxtyping import UInt32

from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.batch.sequence import SequenceStatus
from rjax.batch.token_mask import TokenMask, read_bitmask
from rjax.engine.bad_words import bad_words_masks
from rjax.errors import InvalidRequestError
from rjax.sampling import SamplingParams
from rjax.structured.compiler import GrammarCompiler
from rjax.structured.mask_request import MaskRequest
from rjax.tokenization import Tokenizer


class RequestMasks:
    """Makes token masks for one engine.

    Args:
        tokenizer: of the engine; None where it serves token ids only.
        vocab_size: width of the logits.
        eos_token_ids: ids that end a sequence.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._lock = threading.Lock()
        self._grammars: GrammarCompiler | None = None  # made for the first constraint
        self._cache_limits: tuple[int, float, float, float] | None = None

    @no_type_check  # user input is checked by hand, with readable messages
    def of_request(self, params: SamplingParams, masks: Sequence[TokenMask]) -> Sequence[TokenMask]:
        """One mask per sample, or none.

        Args:
            params: of the request.
            masks: those that the caller gave.

        Raises:
            InvalidRequestError: a wrong number of masks, a mask that is not usable, or masks beside
                ``bad_words``; also as `structured`.
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

    def of_step(
        self, batch: Sequence[ScheduledSequence]
    ) -> tuple[dict[int, UInt32[np.ndarray, " W"]], list[tuple[str, Exception]]]:
        """The masks' bitmasks now, by row, and the requests whose masks fail with their errors."""
        found: dict[int, UInt32[np.ndarray, " W"]] = {}
        failed: list[tuple[str, Exception]] = []
        for row, item in enumerate(batch):
            sequence = item.sequence
            if sequence.mask is None or not item.samples:
                continue
            if sequence.status is SequenceStatus.FINISHED:
                continue
            try:
                found[row] = read_bitmask(sequence.mask, self._vocab_size)
            except Exception as error:  # in its mask: only this request ends
                failed.append((sequence.request_id, error))
        return found, failed

    def structured(
        self, params: SamplingParams, wanted: MaskRequest | None = None
    ) -> list[TokenMask]:
        """The masks of a constraint, one per sample; none without. Any thread may call this.

        Args:
            params: of the request.
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
