"""Samples to draw: their lengths, what a run of them does by counting, and its roofline."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from bench.ceilings import Ceilings
from bench.decode_step.roofline import DecodeCase, stages
from rjax.functional.rollout import REFILL_SHARE
from rjax.models import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Samples to draw.

    Attributes:
        lengths: new tokens of each sample of each prompt.
        prompt_tokens: tokens of each prompt.
        rows: samples that run at once.
        tail_rows: see ``functional.rollout``.
    """

    lengths: Int[np.ndarray, "A n"]
    prompt_tokens: int
    rows: int
    tail_rows: tuple[int, ...] = ()

    @property
    def mean_context(self) -> int:
        """Mean of the new tokens that a running sample has, over all its steps."""
        lengths = self.lengths.astype(float)
        return round(float((lengths**2).sum() / (2 * lengths.sum())))


@dataclasses.dataclass(frozen=True, slots=True)
class Simulated:
    """What a run does, by counting.

    Attributes:
        steps: decode steps.
        in_use: share of the rows of all steps that have a running sample.
        prompts: prompts whose samples run at once; the mean over all new tokens.
        pages: most pages that are held at once.
    """

    steps: int
    in_use: float
    prompts: float
    pages: int


def lognormal_lengths(
    prompts: int, samples: int, *, mean: float, most: int, sigma: float, seed: int
) -> Int[np.ndarray, "A n"]:
    """Lengths of 1 to ``most`` tokens whose mean is about ``mean``.

    Args:
        sigma: deviation of the logarithm.
    """
    normal = np.random.default_rng(seed).standard_normal((prompts, samples))
    low, high = 0.0, float(np.log(most))
    for _ in range(50):  # clipping lowers the mean: find the median that gives it
        middle = (low + high) / 2
        lengths = np.clip(np.exp(middle + sigma * normal), 1, most)
        low, high = (middle, high) if lengths.mean() < mean else (low, middle)
    return np.clip(np.rint(np.exp(high + sigma * normal)), 1, most).astype(np.int32)


def simulate(load: Load, page_size: int) -> Simulated:
    """Count the steps of a rollout whose samples start in order in the rows that are free."""
    lengths, n = load.lengths.ravel(), load.lengths.shape[1]
    refill_rows = max(1, load.rows // REFILL_SHARE)
    job = np.full(load.rows, -1)
    drawn = np.zeros(load.rows, int)
    left = np.full(load.lengths.shape[0], n)  # samples of each prompt that have not ended
    prompt_pages = -(-load.prompt_tokens // page_size)
    waiting, steps, used, offered, pages, read = 0, 0, 0, 0, 0, 0
    while waiting < lengths.size or (job >= 0).any():
        free = np.flatnonzero(job < 0)
        starts = min(free.size, lengths.size - waiting)
        if starts and starts >= min(refill_rows, lengths.size - waiting):
            job[free[:starts]] = np.arange(waiting, waiting + starts)
            drawn[free[:starts]] = 0
            waiting += starts
        running = job >= 0
        count = int(running.sum())
        read += count * np.unique(job[running] // n).size
        fewer = [rows for rows in load.tail_rows if rows >= count and waiting == lengths.size]
        drawn[running] += 1
        own = (load.prompt_tokens % page_size + drawn[running] - 2) // page_size + 1
        prompts = int((left[: -(-waiting // n)] > 0).sum())
        pages = max(pages, int(own.sum()) + prompts * prompt_pages)
        steps, used, offered = steps + 1, used + count, offered + min([load.rows, *fewer])
        ended = running & (drawn >= lengths[np.maximum(job, 0)])
        np.subtract.at(left, job[ended] // n, 1)
        job[ended] = -1
    return Simulated(steps, used / offered, read / used, pages)


def floor_seconds(
    config: ModelConfig, load: Load, prompts_at_once: float, ceilings: Ceilings
) -> float:
    """The roofline of all prompts, and of decode steps with all rows in use."""
    dtype = jnp.dtype(config.dtype)
    prompts, Q, own = load.lengths.shape[0], load.prompt_tokens, load.mean_context
    step = 0.0
    for stage in stages(config, DecodeCase(load.rows, Q, own), dtype):
        groups = prompts_at_once if stage.name == "attention to shared tokens" else 1
        step += ceilings.seconds(groups * stage.moved, stage.flops)
    prefill = 0.0
    for stage in stages(config, DecodeCase(Q, 0, Q), dtype):
        if stage.name == "attention to unique tokens":
            prefill += ceilings.seconds(stage.moved / Q, stage.flops / 2)  # causal
        elif stage.name != "logits":
            prefill += ceilings.seconds(stage.moved, stage.flops)
    return prompts * prefill + load.lengths.sum() / load.rows * step
