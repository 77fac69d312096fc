"""What computed each position of a sequence, and the logits that follow from it.

`KvVersions` watches a real worker: it knows the version of the weights that wrote each token of
each page. `mixed_logits` is a plain forward pass in float64 NumPy whose weights may differ from one
position to the next, as they do for a request that keeps its KV through an update.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rjax.batch.page_operations import CopyPages, SwapIn, SwapOut
from rjax.engine.llm_engine import LLMEngine
from rjax.sampling.sampler import gumbel_noise, step_key
from rjax.sampling.seeds import sequence_seed

type Weights = Mapping[str, np.ndarray]


class Sampled(NamedTuple):
    """How a token came about.

    Attributes:
        version: the version of the weights in the step that sampled it.
        context: for each position before it, the version that computed its KV.
    """

    version: int
    context: tuple[int, ...]


class KvVersions:
    """Watches the steps and the page operations of an engine with one page group.

    Attributes:
        sampled: for each (request id, sample, position), how the token there was sampled last.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.sampled: dict[tuple[str, int, int], Sampled] = {}
        worker, size = engine._worker, engine._page_size
        pages: dict[int, list[int]] = defaultdict(lambda: [-1] * size)
        host: dict[int, list[int]] = {}
        dispatch, move = worker.dispatch, worker.move

        def watched_dispatch(scheduled: Sequence[Any], *args: Any, **options: Any) -> Any:
            version = engine.weights_version
            for each in scheduled:
                for position in range(max(each.start, each.stored), each.stop):
                    pages[each.sequence.pages[0][position // size]][position % size] = version
            for each in scheduled:
                if each.samples:
                    [held] = each.sequence.pages
                    found = [v for page in held for v in pages[page]][: each.stop]
                    key = each.sequence.request_id, each.sequence.index, each.stop
                    self.sampled[key] = Sampled(version, tuple(found))
            return dispatch(scheduled, *args, **options)

        def watched_move(operations: Sequence[Any]) -> None:
            for each in operations:
                match each:
                    case CopyPages():
                        copied = [list(pages[page]) for page in each.source]
                        pages.update(zip(each.target, copied, strict=True))
                    case SwapOut():
                        host.update(
                            (slot, list(pages[page]))
                            for page, slot in zip(each.pages, each.slots, strict=True)
                        )
                    case SwapIn():
                        for slot, page in zip(each.slots, each.pages, strict=True):
                            pages[page] = list(host[slot])
                    case _:
                        raise AssertionError(f"an operation that is not watched: {each}")
            move(operations)

        worker.dispatch, worker.move = watched_dispatch, watched_move


def mixed_logits(
    fields: Mapping[str, Any],
    weights: Mapping[int, Weights],
    tokens: Sequence[int],
    by: Sequence[int],
) -> np.ndarray:
    """Logits [T, V] of a Llama, float64.

    Args:
        fields: its config.json.
        weights: the tensors of its checkpoint, for each version.
        tokens: T token ids.
        by: for each of them, the version that computes it.
    """
    T, H, N = len(tokens), fields["head_dim"], fields["num_attention_heads"]
    K, chosen = fields["num_key_value_heads"], np.array(by)

    def each(name: str, product: Any) -> np.ndarray:
        """A result for each position, by the weights of its version."""
        rows = {v: product(np.float64(weights[v][name])) for v in set(by)}
        return np.stack([rows[v][t] for t, v in enumerate(chosen)])

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return each(f"{name}.weight", lambda w: x @ w.T)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scaled = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + fields["rms_norm_eps"])
        return each(f"{name}.weight", lambda w: scaled * w)

    angles = np.outer(np.arange(T), fields["rope_theta"] ** -(np.arange(0, H, 2) / H))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotated(x: np.ndarray) -> np.ndarray:
        a, b = x[..., : H // 2], x[..., H // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = each("model.embed_tokens.weight", lambda w: w[list(tokens)])
    for layer in range(fields["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        y = norm(x, at + "input_layernorm")
        q = rotated(linear(y, at + "self_attn.q_proj").reshape(T, N, H))
        k = rotated(linear(y, at + "self_attn.k_proj").reshape(T, K, H)).repeat(N // K, 1)
        v = linear(y, at + "self_attn.v_proj").reshape(T, K, H).repeat(N // K, 1)
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(H)
        scores[:, ~np.tri(T, dtype=bool)] = -np.inf
        heads = np.exp(scores - scores.max(-1, keepdims=True))
        heads = np.einsum("nts,snh->tnh", heads / heads.sum(-1, keepdims=True), v)
        x = x + linear(heads.reshape(T, N * H), at + "self_attn.o_proj")
        y = norm(x, at + "post_attention_layernorm")
        gate, up = linear(y, at + "mlp.gate_proj"), linear(y, at + "mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, at + "mlp.down_proj")
    return linear(norm(x, "model.norm"), "lm_head")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    x = logits - logits.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def draw_scores(
    logits: np.ndarray, temperature: float, seed: int, index: int, number: int
) -> np.ndarray:
    """Scores [V] whose argmax is the token that a sample takes.

    Args:
        logits: [V].
        temperature: 0 is greedy.
        seed: of the request.
        index: of the sample.
        number: tokens that the sample has already.
    """
    if not temperature:
        return logits
    own = sequence_seed(seed, index)
    key = np.array([own >> 32, own & 0xFFFFFFFF], np.uint32)
    noise = gumbel_noise(step_key(jax.numpy.asarray(key), number), len(logits))
    return logits / temperature + np.asarray(noise)
