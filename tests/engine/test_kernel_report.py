"""The report of kernels names each operation, its kernel, and why a faster one does not take it."""

import jax.numpy as jnp
import pytest

from rjax.batch.kernel_use import KernelUse
from rjax.benchmarks.model_shapes import SHAPES
from rjax.commands.info import _kernel_lines
from rjax.models import config_from_dict
from rjax.worker.backend import choose_backend
from rjax.worker.kernels.uses import step_kernels

OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 256,
    "hidden_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "ffn_dim": 4096,
    "word_embed_proj_dim": 1024,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "do_layer_norm_before": True,
}


def report(backend_name, rows, fields=None):
    config = config_from_dict(fields or SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 1})
    gpu = {"platform": "gpu", "compute_capability": 9.0}
    backend = choose_backend(
        backend_name,
        **(gpu if backend_name == "mosaic" else {"platform": "cpu", "compute_capability": None}),
        model=config,
        dtype=jnp.dtype(jnp.bfloat16),
        page_size=64,
        devices=1,
    )
    uses = step_kernels(
        rows,
        model=config,
        dtype=jnp.bfloat16,
        kv_dtype=jnp.bfloat16,
        page_size=64,
        backend=backend,
        devices=1,
    )
    return {use.operation: use for use in uses}, uses


def test_operations_that_no_kernel_does_as_a_whole_are_there_for_their_refusals():
    found, uses = report("mosaic", 8)
    layer = found["decoder_layer"]
    assert layer.kernel is None
    [(name, reason)] = layer.refused
    assert name == "mosaic.one_row_layer"
    assert "row" in reason
    assert str(layer) == f"decoder_layer by separate kernels ({name} does not: {reason})"
    assert found["attention"].kernel == "mosaic.paged_attention"  # what it consists of
    lines = _kernel_lines(
        [
            {
                "rows": u.rows,
                "operation": u.operation,
                "kernel": u.kernel,
                "refused": dict(u.refused),
            }
            for u in uses
        ]
    )
    assert any(
        line.split("  ")[0] == "decoder_layer" and "separate kernels" in line for line in lines
    )
    assert f"{name} does not take decoder_layer of 8 rows: {reason}" in lines


def test_a_kernel_of_the_whole_is_the_only_one():
    found, _ = report("mosaic", 1)
    assert found["decoder_layer"].kernel == "mosaic.one_row_layer"
    assert found["decoder_layer"].refused == ()


def test_norms_and_layers_of_another_kind_say_why_they_are_separate():
    found, _ = report("mosaic", 1, OPT)
    for operation in ("norm_linear", "norm_linear_activation"):
        use = found[operation]
        assert use.kernel is None
        assert {reason for _, reason in use.refused} == {"a norm that is not an RMS norm"}
    assert dict(found["decoder_layer"].refused) == {
        "mosaic.one_row_layer": "norms that are not RMS norms"
    }
    assert dict(found["post_attention_block"].refused) == {
        "mosaic.post_attention_block": "norms that are not RMS norms"
    }


@pytest.mark.parametrize("rows", [1, 8])
def test_operations_without_any_kernel_are_left_out(rows):
    found, _ = report("xla", rows)
    assert "decoder_layer" not in found
    assert all(use.kernel is not None for use in found.values())


def test_text_of_a_use():
    assert str(KernelUse(8, "linear", "D -> F", "xla.linear", ())) == "linear D -> F by xla.linear"
