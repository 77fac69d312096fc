"""A sequence ends where a simple oracle says, and shows the text that the oracle shows."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rjax.engine.completion import Completion, StepLogprobs
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.tokenization import OutputText, Tokenizer
from tests.properties import num_examples

from .tiny_tokenizers import build

QUICK = settings(
    max_examples=num_examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FINAL = RequestOutputKind.FINAL_ONLY


def complete(
    tokenizer: Tokenizer | None,
    params: SamplingParams,
    ids: Sequence[int],
    eos: frozenset[int] = frozenset(),
    max_tokens: int = 10**6,
) -> Completion:
    completion = Completion(
        0, params, tokenizer=tokenizer, eos_token_ids=eos, max_tokens=max_tokens
    )
    for token in ids:
        if completion.append(token):
            break
    return completion


def oracle(
    tokenizer: Tokenizer, params: SamplingParams, ids: Sequence[int], eos: set[int], limit: int
) -> tuple[int, str, str | None, int | str | None]:
    """Decodes everything anew after each token: (tokens, text, finish reason, stop reason)."""

    def text_of(part: Sequence[int]) -> str:
        return tokenizer.decode(list(part)).removesuffix("\ufffd")

    before = ""
    for count, token in enumerate(ids, start=1):
        may_stop = count >= params.min_tokens
        if may_stop and token in eos and not params.ignore_eos:
            return count, text_of(ids[: count - 1]), "stop", None
        if may_stop and token in params.stop_ids:
            return count, text_of(ids[: count - 1]), "stop", token
        text = text_of(ids[:count])
        if may_stop:
            for end in range(len(before) + 1, len(text) + 1):
                ending = [s for s in params.stop_strings if text[:end].endswith(s)]
                if ending:
                    stop = max(ending, key=len)
                    keep = end if params.include_stop_str_in_output else end - len(stop)
                    return count, text[:keep], "stop", stop
        before = text
        if count >= limit:
            return count, text, "length", None
    return len(ids), before, None, None


@QUICK
@given(data=st.data())
def test_completion_equals_the_oracle(data: st.DataObject) -> None:
    tokenizer = build("byte_level")
    letters = st.text("ab\n é", min_size=1, max_size=12)
    pieces = data.draw(st.lists(st.one_of(letters, st.just("🙂")), min_size=1, max_size=6))
    # Tokens of each piece on its own: boundaries fall anywhere within the stop strings.
    ids = [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]
    ends = st.sampled_from(ids)
    stop = data.draw(st.lists(st.text("ab\n é🙂", min_size=1, max_size=4), max_size=3))
    params = SamplingParams(
        stop=stop,
        stop_token_ids=data.draw(st.lists(ends, max_size=1)),
        min_tokens=data.draw(st.integers(0, 6)),
        max_tokens=None,
        ignore_eos=data.draw(st.booleans()),
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    eos = set(data.draw(st.lists(ends, max_size=1)))
    limit = data.draw(st.integers(1, 20))
    if params.include_stop_str_in_output:
        eos, params = (
            set(),
            SamplingParams(
                stop=stop,
                include_stop_str_in_output=True,
                min_tokens=params.min_tokens,
                max_tokens=None,
            ),
        )
    count, text, finish, reason = oracle(tokenizer, params, ids, eos, limit)
    found = complete(tokenizer, params, ids, frozenset(eos), limit)
    if finish is None:
        found.abort()
        finish = "abort"
    assert (len(found.token_ids), found.finish_reason, found.stop_reason) == (
        count,
        finish,
        reason,
    )
    assert found.text == text


@QUICK
@given(
    chunks=st.lists(st.text("abc", max_size=5), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_shown_text_is_never_taken_back(chunks: list[str], stop: list[str], include: bool) -> None:
    output, taken, before = OutputText(stop, include_stop=include), "", ""
    for chunk in chunks:
        stopped = output.add(chunk)
        text = output.text
        assert text.startswith(before), "text that was shown disappeared"
        taken += output.take()
        assert taken == text
        before = text
        if stopped is not None:
            break
    output.close()
    assert taken + output.take() == output.text
    if not include:
        assert not any(s in output.text for s in stop)


def test_deltas_add_up_to_the_whole(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("The quick 🙂 brown STOP fox", add_special_tokens=False)
    params = SamplingParams(stop="STOP", max_tokens=None, logprobs=1)
    whole = Completion(0, params, tokenizer=byte_level, eos_token_ids=frozenset(), max_tokens=100)
    text, tokens, entries = "", [], []
    for token in ids:
        done = whole.append(token, StepLogprobs(-0.5, 2, [7], [-0.25]))
        delta = whole.snapshot(RequestOutputKind.DELTA)
        running = whole.snapshot(RequestOutputKind.CUMULATIVE)
        text, tokens = text + delta.text, tokens + delta.token_ids
        entries += delta.logprobs or []
        assert (running.text, running.token_ids) == (text, tokens)
        if done:
            break
    final = whole.snapshot(FINAL)
    assert final.text == text == "The quick 🙂 brown "
    assert final.token_ids == tokens
    assert final.logprobs == entries
    assert (final.finish_reason, final.stop_reason) == ("stop", "STOP")
    assert final.cumulative_logprob == pytest.approx(-0.5 * len(tokens))
    assert whole.snapshot(RequestOutputKind.DELTA).token_ids == []


def test_sampled_token_is_always_among_the_logprobs(byte_level: Tokenizer) -> None:
    step = StepLogprobs(-3.0, 9, [1, 2, 3], [-0.1, -1.0, -2.0])
    for asked, others in ((0, []), (2, [1, 2]), (-1, [1, 2, 3])):
        params = SamplingParams(logprobs=asked)
        completion = Completion(
            0, params, tokenizer=byte_level, eos_token_ids=frozenset(), max_tokens=9
        )
        completion.append(40, step)
        logprobs = completion.snapshot(FINAL).logprobs
        assert logprobs is not None
        assert list(logprobs[0]) == [40, *others]
        assert (logprobs[0][40].logprob, logprobs[0][40].rank) == (-3.0, 9)
        assert [logprobs[0][i].rank for i in others] == [1, 2, 3][: len(others)]
        assert logprobs[0][40].decoded_token == byte_level.token_text(40)


def test_without_tokenizer_there_is_no_text() -> None:
    found = complete(None, SamplingParams(), [5, 6, 7], frozenset({7}))
    assert (found.text, found.token_ids, found.finish_reason) == ("", [5, 6, 7], "stop")


def test_end_token_text_is_kept_only_when_asked(byte_level: Tokenizer) -> None:
    end = byte_level.hf.convert_tokens_to_ids("<|im_end|>")
    ids = [*byte_level.encode("ab", add_special_tokens=False), end]
    for include, text in ((False, "ab"), (True, "ab<|im_end|>")):
        params = SamplingParams(
            include_stop_str_in_output=include, skip_special_tokens=False, stop_token_ids=[end]
        )
        found = complete(byte_level, params, ids)
        assert (found.text, found.stop_reason) == (text, end)


def test_half_a_stop_string_at_the_end_is_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("well STO", add_special_tokens=False)
    running = complete(byte_level, SamplingParams(stop="STOP"), ids)
    assert running.text == "well "
    running.abort()
    assert (running.text, running.finish_reason) == ("well STO", "abort")
    running.abort()
    assert running.finish_reason == "abort"
