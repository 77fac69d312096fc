"""Names and axes of the parameters of MaxText's models: Llama, Qwen and Gemma.

A projection is [inputs, outputs], where heads have an axis of their own. Scanned layers are one
array with their axis behind the first; others are numbered. Some values differ from those of a
Hugging Face checkpoint: Llama's queries are divided by the root of the head dim, and the dims of
its queries and keys are in the order of an interleaved rotary embedding; Gemma's embedding is
multiplied by the root of the model width, Gemma 2's queries are divided by that of the head dim,
and the weights of Gemma's norms have 1 added to them.
"""

import dataclasses
import math

import jax.numpy as jnp

from rjax.models.adopting.layers import in_layers
from rjax.models.adopting.mapping import Targets
from rjax.models.adopting.reading import Reading
from rjax.models.config import ModelConfig

type _Entries = dict[str, tuple[str, Reading]]

_HEADS = Reading("D N H -> (N H) D")
_TRANSPOSED = Reading("D F -> F D")
_EXPERTS = Reading("J D F -> F D")
_INTERLEAVED = Reading("D N (H P) -> (N P H) D", sizes=(("P", 2),))

_ATTENTION: _Entries = {
    "self_attention{}.query.kernel": ("self_attn.q_proj.weight", _HEADS),
    "self_attention{}.key.kernel": ("self_attn.k_proj.weight", _HEADS),
    "self_attention{}.value.kernel": ("self_attn.v_proj.weight", _HEADS),
    "self_attention{}.out.kernel": ("self_attn.o_proj.weight", Reading("N H D -> D (N H)")),
    "self_attention{}.query.bias": ("self_attn.q_proj.bias", Reading("N H -> (N H)")),
    "self_attention{}.key.bias": ("self_attn.k_proj.bias", Reading("N H -> (N H)")),
    "self_attention{}.value.bias": ("self_attn.v_proj.bias", Reading("N H -> (N H)")),
}
_MLP: _Entries = {
    "mlp{}.wi_0.kernel": ("mlp.gate_proj.weight", _TRANSPOSED),
    "mlp{}.wi_1.kernel": ("mlp.up_proj.weight", _TRANSPOSED),
    "mlp{}.wo.kernel": ("mlp.down_proj.weight", _TRANSPOSED),
}
_EXPERT_LAYER: _Entries = {
    "moe_block.gate.kernel": ("mlp.gate.weight", _TRANSPOSED),
    "moe_block.wi_0": ("mlp.experts.*.gate_proj.weight", _EXPERTS),
    "moe_block.wi_1": ("mlp.experts.*.up_proj.weight", _EXPERTS),
    "moe_block.wo": ("mlp.experts.*.down_proj.weight", _EXPERTS),
}
_NORMS = {
    "self_attention{}.query_norm.scale": "self_attn.q_norm.weight",
    "self_attention{}.key_norm.scale": "self_attn.k_norm.weight",
    "pre_self_attention_layer_norm.scale": "input_layernorm.weight",
    "post_self_attention_layer_norm.scale": "post_attention_layernorm.weight",
}
_GEMMA_NORMS = {
    "self_attention{}.query_norm.scale": "self_attn.q_norm.weight",
    "self_attention{}.key_norm.scale": "self_attn.k_norm.weight",
    "pre_self_attention_norm{}.scale": "input_layernorm.weight",
    "post_self_attention_norm{}.scale": "post_attention_layernorm.weight",
    "pre_ffw_norm{}.scale": "pre_feedforward_layernorm.weight",
    "post_ffw_norm{}.scale": "post_feedforward_layernorm.weight",
}
_ATTENTION_PATTERN = 6  # layers of Gemma 3 that are scanned together


def maxtext(config: ModelConfig) -> dict[str, Targets]:
    """The table of a model."""
    name = config.architecture
    gemma2, gemma3 = name.startswith("Gemma2"), name.startswith("Gemma3")
    layer = _layer(config, llama=name == "LlamaForCausalLM", gemma2=gemma2, gemma3=gemma3)
    width = math.sqrt(config.hidden_size)
    width = float(jnp.bfloat16(width)) if gemma3 else width
    padded = (("V", config.vocab_size),)
    scale = 1 / width if gemma2 or gemma3 else 1.0
    table: dict[str, Targets] = {
        "token_embedder.embedding": (
            "model.embed_tokens.weight",
            Reading("V D -> V D", first=padded, scale=scale),
        ),
        "decoder.decoder_norm.scale": (
            "model.norm.weight",
            Reading("D -> D", offset=-1.0 if gemma2 or gemma3 else 0.0),
        ),
        "decoder.logits_dense.kernel": ("lm_head.weight", Reading("D V -> V D", first=padded)),
    }
    if gemma2:  # a layer of MaxText is one with a window and one without
        for kind, start in (("_local", 0), ("_global", 1)):
            pair = _named(layer, kind, start=start, step=2)
            table |= _scanned(pair, "decoder.layers.") | in_layers({**pair}, "decoder.layers_*.")
        return table
    if gemma3:
        scanned = config.num_layers // _ATTENTION_PATTERN * _ATTENTION_PATTERN
        for number in range(_ATTENTION_PATTERN):
            part = _named(layer, "", start=number, step=_ATTENTION_PATTERN)
            table |= _scanned(part, f"decoder.layers.layers_{number}.")
        rest = _named(layer, "", start=scanned)
        table |= in_layers({**rest}, "decoder.layers_remainder.layers_*.")
    else:
        table |= _scanned(_named(layer, ""), "decoder.layers.")
    return table | in_layers({**_named(layer, "")}, "decoder.layers_*.")


def _layer(config: ModelConfig, *, llama: bool, gemma2: bool, gemma3: bool) -> _Entries:
    """The entries of a layer, with brackets where Gemma 2 has the kind of layer."""
    offset = -1.0 if gemma2 or gemma3 else 0.0
    norms = _GEMMA_NORMS if gemma2 or gemma3 else _NORMS
    layer = _ATTENTION | _MLP | _EXPERT_LAYER
    layer |= {name: (norm, Reading("D -> D", offset=offset)) for name, norm in norms.items()}
    query = _INTERLEAVED if llama else _HEADS
    if llama or gemma2:
        query = dataclasses.replace(query, scale=math.sqrt(config.head_dim))
    layer["self_attention{}.query.kernel"] = "self_attn.q_proj.weight", query
    if llama:
        layer["self_attention{}.key.kernel"] = "self_attn.k_proj.weight", _INTERLEAVED
    return layer


def _named(layer: _Entries, kind: str, start: int = 0, step: int = 1) -> _Entries:
    """The entries of one kind of layers, which are numbered so."""
    return {
        name.format(kind): (tensor, dataclasses.replace(reading, start=start, step=step))
        for name, (tensor, reading) in layer.items()
    }


def _scanned(layer: _Entries, start: str) -> dict[str, Targets]:
    """The entries of arrays that hold all layers, along their second axis."""
    stacked: dict[str, Targets] = {}
    for name, (tensor, reading) in layer.items():
        first, _, rest = reading.pattern.partition(" ")
        pattern = f"{first} L {rest}"
        stacked[name] = tensor, dataclasses.replace(reading, pattern=pattern)
    return in_layers(stacked, start)
