"""Alternatives in JAX for the same batch: the Pallas operation of JAX, and cuDNN."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from bench.ceilings import Ceilings
from bench.kernels.cases.attention import Case, Inputs
from bench.kernels.check import output_error
from bench.kernels.run_case import CACHE_BYTES, chain_length
from bench.kernels.timing import burst_seconds

MOST_BYTES = 24 << 30  # of KV in a peer's layout
_CALLS = 16  # in one program; each adds compile time
_FULL = 264  # work items that fill an H200 twice


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One way to call a peer.

    Attributes:
        name: of the setting.
        arrange: converts (k, v) pages of one layer to the arguments of ``call`` after the queries.
        call: (q [T, N, H], *arranged) to the output [T, N, H].
        kv_bytes: of one layer in that layout.
        tolerance: largest allowed relative error.
    """

    name: str
    arrange: Callable[..., tuple[jax.Array, ...]]
    call: Callable[..., jax.Array]
    kv_bytes: float
    tolerance: float = 1e-2


def pallas_paged(case: Case, inputs: Inputs) -> Iterator[Variant]:
    """``jax.experimental.pallas.ops.gpu.paged_attention``, over pages with the head first; no
    sharing, so every row reads the shared pages."""
    if case.queries > 1:
        raise NotImplementedError("it takes one query row a sequence")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    lengths = jnp.asarray(case.context, jnp.int32)
    most = -(-_FULL // (case.batch * case.K))
    for splits in sorted({1 << max(0, (most - 1).bit_length()), 1 if most > 1 else 4}):
        width = -(-inputs.page_table.shape[1] // splits) * splits
        padding = ((0, 0), (0, width - inputs.page_table.shape[1]))
        table = jnp.pad(inputs.page_table, padding)

        def call(q, k, v, splits=splits, table=table):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                return paged_attention(
                    q,
                    k,
                    v,
                    table,
                    lengths,
                    pages_per_compute_block=1,
                    k_splits=splits,
                    num_warps=4,
                    interpret=jax.default_backend() == "cpu",
                )

        def arrange(k, v):
            # It has no scale argument: the keys are scaled, which costs no time.
            k, v = (jnp.nan_to_num(x.swapaxes(0, 1)) for x in (k, v))
            return (k * case.spec.scale).astype(k.dtype), v

        yield Variant(f"{splits} splits", arrange, call, case.bytes())


def cudnn(case: Case, inputs: Inputs) -> Iterator[Variant]:
    """``jax.nn.dot_product_attention`` on contiguous KV of each sequence."""
    longest = int(case.context.max())
    lengths = jnp.asarray(case.context, jnp.int32)

    def call(q, k, v):
        out = _attend(
            q.reshape(case.batch, case.queries, case.N, case.H),
            k,
            v,
            key_value_seq_lengths=lengths,
            is_causal=case.queries > 1,
        )
        return out.reshape(q.shape)

    if case.queries > 1 and case.queries != longest:
        raise NotImplementedError("its causal mask begins at the first token")
    arrange = functools.partial(_contiguous, table=inputs.page_table, tokens=longest)
    size = 2 * 2 * case.batch * longest * case.K * case.H
    yield Variant("", arrange, call, size)


def cudnn_once(case: Case, inputs: Inputs) -> Iterator[Variant]:
    """Attention to shared and to unique tokens in two calls, merged by their LSE."""
    if case.queries > 1 or case.share == "off" or case.batch == case.prefixes:
        return  # nothing is shared
    P, rows, first = case.prefixes, case.batch // case.prefixes, case.shared // case.S
    own = jnp.asarray(case.own_tokens, jnp.int32)
    table = inputs.page_table
    segments = (
        (table[::rows, :first], case.shared),
        (table[:, first:], int(case.own_tokens.max())),
    )

    def arrange(k, v):
        found = [_contiguous(k, v, table=table, tokens=tokens) for table, tokens in segments]
        return (*found[0], *found[1])

    def call(q, k_shared, v_shared, k_own, v_own):
        shape = (P, rows, case.N, case.H)
        shared, lse = _attend(q.reshape(shape), k_shared, v_shared, return_residual=True)
        rest, lse_rest = _attend(
            q[:, None], k_own, v_own, key_value_seq_lengths=own, return_residual=True
        )
        weight = jax.nn.sigmoid(
            lse.reshape(case.batch, case.N).astype(jnp.float32)
            - lse_rest.reshape(case.batch, case.N).astype(jnp.float32)
        )[..., None]
        merged = shared.reshape(q.shape) * weight + rest.reshape(q.shape) * (1 - weight)
        return merged.astype(q.dtype)

    # The LSE has the queries' dtype, and its rounding error remains after the merge.
    yield Variant("", arrange, call, case.bytes(), tolerance=4e-2)


def measure(
    case: Case, inputs: Inputs, variant: Variant, ceilings: Ceilings
) -> tuple[float, float]:
    """(seconds of a call, relative error).

    Raises:
        MemoryError: its KV would be more than ``MOST_BYTES``.
        ValueError: the result is wrong.
    """
    if variant.kv_bytes > MOST_BYTES:
        raise MemoryError(f"its KV would take {variant.kv_bytes / 2**30:.0f} GiB")
    arrange = jax.jit(variant.arrange)
    call = jax.jit(variant.call)
    first = arrange(*inputs.pools[0])
    error = output_error(case, inputs, call(inputs.q, *first))
    if not error < variant.tolerance:
        raise ValueError(f"wrong result, relative error {error:.1e}")
    layers = max(1, min(len(inputs.pools), int(CACHE_BYTES // variant.kv_bytes)))
    pools = [first] + [arrange(*pool) for pool in inputs.pools[1:layers]]
    about = 1e6 * variant.kv_bytes / ceilings.copy
    length = min(chain_length(layers, about), max(layers, _CALLS))

    @jax.jit
    def chain(q, pools):
        for i in range(length):
            q = variant.call(q, *pools[i % layers])
        return q

    seconds = burst_seconds(functools.partial(chain, inputs.q, pools), rounds=3)
    return seconds / length, error


def _attend(q, k, v, **options):
    on_gpu = jax.default_backend() == "gpu"
    return jax.nn.dot_product_attention(
        q, k, v, implementation="cudnn" if on_gpu else "xla", **options
    )


def _contiguous(k, v, *, table: jax.Array, tokens: int) -> tuple[jax.Array, ...]:
    """[P, K, S, H] pages of each table row one after another, [B, tokens, K, H], NaN as 0."""

    def lay(pages: jax.Array) -> jax.Array:
        run = pages[table].swapaxes(2, 3)
        B, M, S, K, H = run.shape
        return jnp.nan_to_num(run.reshape(B, M * S, K, H)[:, :tokens])

    return lay(k), lay(v)


PEERS: dict[str, Callable[[Case, Inputs], Iterator[Variant]]] = {
    "pallas": pallas_paged,
    "cudnn": cudnn,
    "cudnn_once": cudnn_once,
}
