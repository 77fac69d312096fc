"""The sampler's mathematics one token at a time in NumPy, to hold the fast code against."""

import itertools
import math

import numpy as np

from rjax.sampling import SamplingParams

MARGIN = 1e-5


class TooCloseError(Exception):
    """A threshold falls so close to a token that rounding decides; no fair comparison."""


def processed(logits, params: SamplingParams, prompt, output, eos) -> list[float]:
    """Logits of one row after masks, bias and penalties; -inf is forbidden."""
    held_back = set(params.suppressed_ids(eos)) if len(output) < params.min_tokens else set()
    result = []
    for token, logit in enumerate(map(float, logits)):
        allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        if not allowed or token in held_back:
            result.append(-math.inf)
            continue
        logit += (params.logit_bias or {}).get(token, 0.0)
        count = list(output).count(token)
        if count or token in prompt:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
        result.append(logit)
    return result


def probabilities(logits, params: SamplingParams, prompt=(), output=(), eos=()) -> np.ndarray:
    """What one row samples from."""
    x = processed(logits, params, prompt, output, eos)
    if params.greedy:
        best = max(x)
        if sorted(x)[-2] > best - MARGIN:
            raise TooCloseError
        return np.array([float(v == best) for v in x])
    x = [v / params.temperature for v in x]
    best = max(x)
    weight = [math.exp(v - best) for v in x]

    if params.min_p:
        _clear(params.min_p, [w for w in weight if w < 1])
        weight = [w if w >= params.min_p else 0.0 for w in weight]
    if params.top_k and params.top_k < len(x):
        kth = sorted(weight, reverse=True)[params.top_k - 1]
        _clear_of_near_ties(weight)
        weight = [w if w >= kth else 0.0 for w in weight]
    if params.top_p < 1:
        _clear_of_near_ties(weight)
        total, running, last = sum(weight), 0.0, 0.0
        for w in sorted(weight, reverse=True):
            if running >= params.top_p * total:
                break
            running, last = running + w, w
            _clear(params.top_p, [running / total])
        weight = [w if w >= last else 0.0 for w in weight]
    return np.array(weight) / sum(weight)


def _clear(bound: float, values) -> None:
    if any(abs(v - bound) < MARGIN for v in values):
        raise TooCloseError


def _clear_of_near_ties(weight) -> None:
    ranked = sorted(weight)
    if any(0 < b - a < MARGIN * b for a, b in itertools.pairwise(ranked)):
        raise TooCloseError
