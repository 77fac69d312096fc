"""SamplingParams: defaults, normal forms and every kind of bad input."""

import copy
import dataclasses
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rjax.errors import InvalidRequestError
from rjax.sampling import LIMITS, RequestOutputKind, SamplingParams, sequence_seed, step_mode

HUGE = 10**5000
WHOLE = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
REAL = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
)
FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
BAD = [
    *[(name, bad) for name in WHOLE for bad in (True, 1.5, math.nan, "1", [], HUGE, -HUGE)],
    *[(name, -2) for name in WHOLE if name != "seed"],
    *[(name, 2**31) for name in WHOLE if name != "seed"],
    *[(name, bad) for name in ("n", "max_tokens") for bad in (0, -1)],
    ("min_tokens", -1),
    *[(name, None) for name in ("n", "top_k", "min_tokens", *REAL, *FLAGS)],
    *[
        (name, bad)
        for name in REAL
        for bad in (True, "1", [], 1j, math.nan, -math.inf, 2**31, HUGE, np.float32("inf"))
    ],
    *[(name, bad) for name in ("temperature", "top_p", "min_p", "repetition_penalty")
      for bad in (-1e-6, -1)],
    *[(name, bad) for name in FLAGS for bad in (0, 1, "true", [])],
    ("n", 16385),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("temperature", 2.0001),
    ("top_p", 0),
    ("top_p", 1.0001),
    ("min_p", 1.0001),
    ("repetition_penalty", 0),
    ("presence_penalty", 2.0001),
    ("frequency_penalty", -2.0001),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 3),
    ("stop", b"a"),
    ("stop", {"a": 1}),
    ("stop", (text for text in "ab")),
    ("stop", [str(i) for i in range(17)]),
    ("stop", "x" * 1025),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("bad_words", [1]),
    ("bad_words", [str(i) for i in range(129)]),
    ("stop_token_ids", 3),
    ("stop_token_ids", "3"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", list(range(65))),
    ("allowed_token_ids", []),
    ("allowed_token_ids", 3),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [2**63]),
    ("logit_bias", [1]),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {2**31: 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: "1"}),
    ("logit_bias", {i: 1.0 for i in range(1025)}),
    ("logprobs_mode", "raw"),
    ("logprobs_mode", "processed_logits"),
    ("logprobs_mode", ["raw_logprobs"]),
    ("output_kind", "delta"),
    ("output_kind", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bad"), BAD, ids=lambda value: type(value).__name__)
def test_bad_value_is_refused_by_name_with_a_remedy(name, bad):
    with pytest.raises(InvalidRequestError, match=rf"{name}.*give") as caught:
        SamplingParams(**{name: bad})
    assert len(str(caught.value)) < 300


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    expected = dict(
        n=1, best_of=None, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, stop=(), stop_token_ids=(),
        ignore_eos=False, max_tokens=16, min_tokens=0, logprobs=None, prompt_logprobs=None,
        logprobs_mode=None, detokenize=True,
        skip_special_tokens=True, spaces_between_special_tokens=True,
        include_stop_str_in_output=False, output_kind=RequestOutputKind.CUMULATIVE,
        logit_bias=None, allowed_token_ids=None, bad_words=None, structured_outputs=None,
    )  # fmt: skip
    assert dataclasses.asdict(params) == expected
    assert hash(params) == hash(SamplingParams())
    assert copy.deepcopy(params) == params


def test_normal_forms():
    params = SamplingParams(
        n=np.int64(2),
        top_k=-1,
        top_p=np.float32(0.5),
        stop="end",
        stop_token_ids=np.array([3, 3, 4]),
        logit_bias={np.int32(5): 250, 6: -1e9, 7: 1},
        bad_words=["a", "b", "a"],
        ignore_eos=np.bool_(True),
        max_tokens=None,
    )
    assert type(params.n) is int
    assert params.n == 2
    assert params.top_k == 0
    assert type(params.top_p) is float
    assert params.stop_strings == ("end",)
    assert params.stop_ids == (3, 4)
    assert params.logit_bias == {5: 100.0, 6: -100.0, 7: 1.0}
    assert params.ignore_eos is True
    assert params.bad_words == ("a", "b")
    assert SamplingParams(bad_words=[]).bad_words is None
    assert SamplingParams(stop=["a", "b", "a"]).stop_strings == ("a", "b")
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_greedy_makes_the_rest_neutral():
    params = SamplingParams(temperature=9e-6, top_p=0.1, top_k=3, min_p=0.4)
    assert params.greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
    with pytest.raises(InvalidRequestError, match="n is 2 with greedy"):
        SamplingParams(temperature=0, n=2)


def test_tiny_temperature_is_raised_with_a_warning():
    with pytest.warns(UserWarning, match="raised to 0.01") as caught:
        params = SamplingParams(temperature=0.005)
    assert params.temperature == 0.01
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(min_tokens=5, max_tokens=4), "min_tokens is 5 and max_tokens 4"),
        (dict(stop="a", detokenize=False), "detokenize"),
        (dict(n=3, best_of=2), "best_of is 2 and n 3; give a best_of that is not below n"),
        (dict(best_of=3, temperature=0), "best_of is 3 with greedy"),
        (dict(best_of=2, output_kind=RequestOutputKind.DELTA), "do not stream"),
        (dict(best_of=0), "best_of is 0; give a whole number from 1 to 16384, or None"),
        (dict(best_of=2**31), "best_of is 2147483648"),
        (dict(best_of=2.5), "best_of is 2.5"),
    ],
)
def test_contradictions(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**options)


def test_unknown_option_names_the_nearest():
    with pytest.raises(InvalidRequestError, match=r"'temprature'; the nearest is 'temperature'"):
        SamplingParams.from_options({"temprature": 1})
    with pytest.raises(InvalidRequestError, match="'best_off'; the nearest is 'best_of'"):
        SamplingParams.from_options({"best_off": 2})
    with pytest.raises(TypeError):
        SamplingParams(best_off=2)  # type: ignore[call-arg]


def test_options_in_the_forms_of_json():
    params = SamplingParams.from_options(
        {"temperature": None, "max_tokens": None, "logit_bias": {"5": 1}, "output_kind": "delta"}
    )
    assert params.temperature == 1.0
    assert params.max_tokens is None
    assert params.logit_bias == {5: 1.0}
    assert params.output_kind is RequestOutputKind.DELTA
    for bad in ({"logit_bias": {"x": 1}}, {"logit_bias": {"²": 1}}, {"output_kind": "some"}):
        with pytest.raises(InvalidRequestError):
            SamplingParams.from_options(bad)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_token_ids_are_held_against_the_width_of_the_logits(name):
    def asking_for(token):
        return SamplingParams(**{name: {token: 1.0} if name == "logit_bias" else [token]})

    asking_for(31).check_model(32, 20)
    with pytest.raises(InvalidRequestError, match=f"{name} holds token id 32.*0 to 31"):
        asking_for(32).check_model(32, 20)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_held_against_the_engine(name):
    for number in (None, 0, 20):
        SamplingParams(**{name: number}).check_model(32, 20)
    SamplingParams(**{name: -1}).check_model(20, 20)
    for number in (21, -1):
        with pytest.raises(InvalidRequestError, match=f"{name} is {number}"):
            SamplingParams(**{name: number}).check_model(32, 20)


def test_min_tokens_must_leave_a_token():
    params = SamplingParams(min_tokens=2, allowed_token_ids=[1, 2], stop_token_ids=[2])
    params.check_model(32, 20)
    with pytest.raises(InvalidRequestError, match="every allowed token ends"):
        params.check_model(32, 20, eos_token_ids=[1])
    dataclasses.replace(params, ignore_eos=True).check_model(32, 20, eos_token_ids=[1])


def test_modes():
    assert SamplingParams(temperature=0).sampler_mode == "greedy"
    assert SamplingParams().sampler_mode == "random"
    for option in (
        dict(presence_penalty=1), dict(frequency_penalty=-1), dict(repetition_penalty=2),
        dict(min_tokens=1), dict(logit_bias={1: 1}), dict(allowed_token_ids=[1]),
    ):  # fmt: skip
        assert SamplingParams(temperature=0, **option).sampler_mode == "full"
    for option in (dict(top_k=1), dict(top_p=0.5), dict(min_p=0.5)):
        assert SamplingParams(**option).sampler_mode == "full"
    assert step_mode([]) == "greedy"
    assert step_mode(["greedy", "random"]) == "random"
    assert step_mode(["full", "random", "greedy"]) == "full"


def test_sequence_seeds():
    seeds = [sequence_seed(2**63 - 1, index) for index in range(100)]
    assert seeds[0] == 2**63 - 1
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sequence_seed(0, 1) == 5836529245451711556


def test_negative_seeds():
    """-1 is no seed, as in vLLM; other negative seeds are seeds of their own."""
    assert SamplingParams(seed=-1) == SamplingParams(seed=None)
    assert SamplingParams(seed=-2).seed == -2
    first = {sequence_seed(seed, 0) for seed in (-(2**63), -2, 0, 2, 2**63 - 1)}
    assert len(first) == 5
    assert all(0 <= seed < 2**64 for seed in first)
    assert sequence_seed(-2, 1) != sequence_seed(2, 1)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31 - 1, 2**31, 2**63, 10**400])
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(list(RequestOutputKind)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers(), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.filterwarnings("ignore:temperature")
# The first text drawn in a fresh checkout waits for Hypothesis' table of Unicode.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(SamplingParams)]),
        ANYTHING,
        max_size=3,
    )
)
def test_anything_is_either_refused_or_within_bounds(options):
    try:
        params = SamplingParams.from_options(options)
        params.check_model(1000, 20)
    except InvalidRequestError as error:
        assert len(str(error)) < 300  # noqa: PT017
        return
    assert all(math.isfinite(getattr(params, name)) for name in REAL)
    assert 1 <= params.n <= LIMITS.n
    assert params.max_tokens is None or params.min_tokens <= params.max_tokens
    assert all(0 <= i < 1000 for i in (*params.stop_ids, *(params.logit_bias or ())))
