"""Chooses the best samples of a request with ``best_of``."""

from rjax.outputs import CompletionOutput
from rjax.sampling import SamplingParams


def best_samples(outputs: list[CompletionOutput], params: SamplingParams) -> list[CompletionOutput]:
    """The best ``n`` samples by cumulative log-probability, best first and numbered anew.

    Args:
        outputs: everything so far of each sample, with ``cumulative_logprob``; those chosen are
            changed.
        params: the request's parameters.
    """
    # A sample that was cut off has few tokens and so a high cumulative logprob: rank it last.
    ranks = [(o.finish_reason in ("stop", "length"), o.cumulative_logprob or 0.0) for o in outputs]
    best = sorted(range(len(outputs)), key=lambda i: ranks[i], reverse=True)[: params.n]
    chosen = [outputs[i] for i in best]
    # Aborted samples might have been better, so the choice reports their end.
    cut_off = any(output.finish_reason == "abort" for output in outputs)
    for index, output in enumerate(chosen):
        output.index = index
        if params.logprobs is None:
            output.logprobs = None
        if cut_off and output.finish_reason is not None:
            output.finish_reason = "abort"
            output.stop_reason = None
    return chosen
