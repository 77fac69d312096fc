"""A mask decides what may come next, for its own sequence only, and its errors end it alone."""

import numpy as np
import pytest

from rjax.errors import InvalidRequestError
from rjax.sampling import SamplingParams

from .tiny import VOCAB, make_engine, run

pytestmark = pytest.mark.usefixtures("kept")

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
WORDS = -(-VOCAB // 32)


class Script:
    """Allows the tokens of a list one after the other."""

    def __init__(self, tokens: list[int], fails_after: int | None = None) -> None:
        self.tokens, self.taken, self.fails_after = tokens, [], fails_after

    @property
    def bitmask(self) -> np.ndarray:
        token = self.tokens[len(self.taken)]
        words = np.zeros(WORDS, np.uint32)
        words[token // 32] = np.uint32(1 << token % 32)
        return words

    def accept(self, token_id: int) -> None:
        assert token_id == self.tokens[len(self.taken)]
        self.taken.append(token_id)
        if self.fails_after == len(self.taken):
            raise RuntimeError("this mask cannot go on")


@pytest.fixture(scope="module")
def engine(tiny):
    return make_engine(tiny)


def ask(engine, name, params, masks=()):
    engine.add_request(name, PROMPT, params, masks=masks)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mask_decides_every_token_and_no_neighbour_notices(engine, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=3)
    alone = run(engine, [("alone", PROMPT, params)])["alone"].outputs[0].token_ids
    scripts = [[(i * 7 + k) % VOCAB for i in range(12)] for k in range(2)]
    for k, tokens in enumerate(scripts):
        ask(engine, f"masked {k}", params, [Script(tokens)])
    done = run(engine, [("free", PROMPT, params)])
    assert [done[f"masked {k}"].outputs[0].token_ids for k in range(2)] == scripts
    assert done["free"].outputs[0].token_ids == alone
    # Nothing stays in the slots.
    assert run(engine, [("after", PROMPT, params)])["after"].outputs[0].token_ids == alone


def test_mask_and_allow_list_hold_together(engine):
    class Pair(Script):
        """Allows the next token of the list, and token 3."""

        @property
        def bitmask(self) -> np.ndarray:
            words = super().bitmask
            words[0] |= np.uint32(1 << 3)
            return words

    tokens = [40, 41, 40, 41]
    params = SamplingParams(temperature=1, max_tokens=4, allowed_token_ids=[40, 41, 42])
    ask(engine, "both", params, [Pair(tokens)])
    assert run(engine, [])["both"].outputs[0].token_ids == tokens


def test_masks_change_nothing_that_is_reported(engine):
    """Log-probabilities of prompt and output, of a request that is held for its neighbour."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    alone = run(engine, [("alone", PROMPT, params)])["alone"]
    ask(engine, "masked", SamplingParams(max_tokens=12), [Script(list(range(12)))])
    beside = run(engine, [("beside", PROMPT, params)])["beside"]
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
    for kind in ("prompt_logprobs", "logprobs"):
        of = [alone, beside] if kind == "prompt_logprobs" else [alone.outputs[0], beside.outputs[0]]
        one, two = (getattr(x, kind) for x in of)
        for before, after in zip(one, two, strict=True):
            assert (before or {}).keys() == (after or {}).keys()
            for token in before or ():
                assert after[token].logprob == pytest.approx(before[token].logprob, abs=1e-4)


def test_failing_mask_ends_its_request_alone(engine):
    params = SamplingParams(temperature=0, max_tokens=12)
    ask(engine, "bad", params, [Script(list(range(12)), fails_after=4)])
    done = run(engine, [("good", PROMPT, params)])
    assert done["bad"].outputs[0].finish_reason == "error"
    assert done["bad"].outputs[0].token_ids == [0, 1, 2, 3]
    assert done["good"].outputs[0].finish_reason == "length"
    engine.reset_prefix_cache()
    assert engine.stats().kv_bytes_used == 0


@pytest.mark.parametrize("bad", [0, 2])
def test_failing_mask_ends_its_sample_alone(engine, bad):
    params = SamplingParams(n=3, max_tokens=8)
    scripts = [Script(list(range(10 * i, 10 * i + 8))) for i in range(3)]
    scripts[bad] = Script(list(range(8)), fails_after=4)
    ask(engine, "three", params, scripts)
    done = run(engine, [])["three"]
    ends = [(o.finish_reason, len(o.token_ids)) for o in done.outputs]
    assert ends == [("error", 4) if i == bad else ("length", 8) for i in range(3)]
    assert str(done.error) == done.outputs[bad].stop_reason
    engine.reset_prefix_cache()
    assert engine.stats().kv_bytes_used == 0


def test_a_failing_sample_is_not_among_the_best(engine):
    params = SamplingParams(n=2, best_of=3, max_tokens=8)
    scripts = [Script(list(range(10 * i, 10 * i + 8))) for i in range(3)]
    scripts[1] = Script(list(range(8)), fails_after=1)
    ask(engine, "best", params, scripts)
    outputs = run(engine, [])["best"].outputs
    assert [(o.index, o.finish_reason) for o in outputs] == [(0, "length"), (1, "length")]


def test_each_sample_has_its_mask(engine):
    params = SamplingParams(n=2, max_tokens=6)
    scripts = [[1, 2, 3, 4, 5, 6], [60, 61, 62, 63, 64, 65]]
    ask(engine, "two", params, [Script(tokens) for tokens in scripts])
    assert [o.token_ids for o in run(engine, [])["two"].outputs] == scripts
    with pytest.raises(InvalidRequestError, match="masks"):
        ask(engine, "one", params, [Script([1])])


class Fixed:
    """Always the same bitmask."""

    def __init__(self, bitmask: object) -> None:
        self.bitmask = bitmask

    def accept(self, token_id: int) -> None: ...


def test_unusable_masks_are_refused_when_they_are_given(engine):
    class Raises(Fixed):
        @property
        def bitmask(self) -> np.ndarray:
            raise IndexError("no such token")

        @bitmask.setter
        def bitmask(self, value: object) -> None: ...

    only_beyond = np.zeros(WORDS, np.uint32)
    only_beyond[-1] = np.uint32(1 << VOCAB % 32)
    params = SamplingParams(temperature=0, max_tokens=4)
    for mask, message in (
        (Fixed(np.ones(WORDS + 1, np.uint32)), r"is uint32\[5\]; give uint32\[4\]"),
        (Fixed(np.ones(WORDS, np.int32)), "is int32"),
        (Fixed([1] * WORDS), "is list"),
        (Fixed(np.zeros(WORDS, np.uint32)), "allows no token"),
        (Fixed(only_beyond), "allows no token"),
        (Raises(None), "IndexError"),
        ("mask", "is str; give an object with bitmask and accept"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            ask(engine, "bad", params, [mask])
    assert not engine.has_unfinished_requests()


def test_bits_beyond_the_vocabulary_are_ignored(engine):
    bitmask = np.zeros(WORDS, np.uint32)
    bitmask[-1] = 0xFFFFFFFF ^ ((1 << VOCAB % 32) - 1)
    bitmask[0] = 1 << 5
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature, max_tokens=4)
        ask(engine, "beyond", params, [Fixed(bitmask)])
        assert run(engine, [])["beyond"].outputs[0].token_ids == [5] * 4


@pytest.mark.parametrize("becomes", [None, np.ones(1, np.uint32), np.zeros(WORDS, np.uint32)])
def test_a_mask_that_fails_later_ends_its_request_alone(engine, becomes):
    class Later(Fixed):
        def accept(self, token_id: int) -> None:
            self.bitmask = becomes

    params = SamplingParams(temperature=0, max_tokens=8)
    alone = run(engine, [("alone", PROMPT, params)])["alone"].outputs[0].token_ids
    bitmask = np.zeros(WORDS, np.uint32)
    bitmask[0] = 1 << 5
    ask(engine, "bad", SamplingParams(n=2, max_tokens=8), [Later(bitmask), Fixed(bitmask)])
    done = run(engine, [("good", PROMPT, params)])
    assert done["good"].outputs[0].token_ids == alone
    assert [o.finish_reason for o in done["bad"].outputs] == ["error", "error"]
    assert [o.token_ids for o in done["bad"].outputs] == [[5], [5]]
    assert isinstance(done["bad"].error, InvalidRequestError)
    assert run(engine, [("after", PROMPT, params)])["after"].outputs[0].token_ids == alone
    engine.reset_prefix_cache()
    assert engine.stats().kv_bytes_used == 0
