"""What the sampler's tests share: small sizes, compiled functions, random requests."""

import dataclasses

import jax
import numpy as np
from hypothesis import strategies as st

from rjax.sampling import SamplingParams, SamplingState, admit, init_state, sample, slot_row
from rjax.sampling.processing import process
from rjax.sampling.sampler import scaled

V = 40  # not a multiple of 32
SLOTS, WIDTH = 6, 5  # rows of the state and of a step, the same everywhere: little to compile
EOS = (0, 7)

_STATIC = ("mode", "num_logprobs", "processed_logprobs")
step = jax.jit(sample, static_argnames=_STATIC)
donating_step = jax.jit(sample, static_argnames=_STATIC, donate_argnames="state")


@jax.jit
def full_scaled(logits, rows):
    """Logits whose softmax a row of a full step samples from."""
    return scaled(process(logits, rows), rows, truncated=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A sequence: what was asked, and its tokens so far."""

    params: SamplingParams
    seed: int = 0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()

    def row(self, output=None):
        return slot_row(
            self.params,
            seed=self.seed,
            prompt_token_ids=self.prompt,
            output_token_ids=self.output if output is None else output,
            eos_token_ids=EOS,
            vocab_size=V,
        )


def admitted(cases: dict[int, Case]) -> SamplingState:
    """A state with the cases in the slots they are keyed by."""
    return admit(init_state(SLOTS, V), {slot: case.row() for slot, case in cases.items()})


EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    min_tokens=3,
    stop_token_ids=[5],
    logit_bias={1: 3.0, 39: -100.0},
    allowed_token_ids=[*range(30), 39],
)

TOKEN = st.integers(0, V - 1)

# The options stay a mapping until a test makes the request: the type checks of the test run draw
# random numbers of their own, which hypothesis does not allow inside a strategy.
REQUESTS = st.fixed_dictionaries(
    {"ignore_eos": st.booleans()},
    optional={
        "temperature": st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]),
        "top_k": st.integers(0, V + 5),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "repetition_penalty": st.sampled_from([0.5, 1.25, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.25, 2.0]),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(TOKEN, max_size=3),
        "logit_bias": st.dictionaries(TOKEN, st.integers(-12, 12), max_size=4),
        "allowed_token_ids": st.lists(TOKEN, min_size=6, max_size=V, unique=True),
    },
)
SEQUENCES = st.fixed_dictionaries(
    {
        "params": REQUESTS,
        "seed": st.integers(0, 2**64 - 1),
        "prompt": st.lists(TOKEN, max_size=6).map(tuple),
        "output": st.lists(TOKEN, max_size=5).map(tuple),
    }
)


def made(drawn: dict) -> Case:
    """The sequence that ``SEQUENCES`` drew."""
    return Case(**{**drawn, "params": SamplingParams(**drawn["params"])})


def logits_of(seed: int, rows: int) -> np.ndarray:
    """Logits on a grid of 1/8, so that there are ties."""
    return (np.random.default_rng(seed).integers(-40, 40, (rows, V)) / 8).astype(np.float32)
