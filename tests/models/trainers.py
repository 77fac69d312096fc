"""Parameters as trainers hold them, made of the tensors of a checkpoint.

Written anew from what each trainer's own conversion of checkpoints does, not from rjax's tables.
"""

import math
import re

import ml_dtypes
import numpy as np

from rjax.models.decoder import Decoder
from rjax.models.loading.stored_model import stored_model

LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)_proj\.weight")


def checkpoint(config, seed=0, dtype=np.float32):
    """Random tensors of a checkpoint, by name."""
    draw = np.random.default_rng(seed)
    stored = stored_model(Decoder(config, dtype), config, {})
    shapes = stored.expected.shapes(config)
    return {name: draw.normal(size=shapes[name][0]).astype(dtype) for name in sorted(shapes)}


def by_layer(tensors):
    """(other tensors, the tensors of each layer by the end of their names), experts stacked."""
    rest, layers = {}, {}
    for name, tensor in tensors.items():
        if found := LAYER.fullmatch(name):
            layers.setdefault(int(found[1]), {})[found[2]] = tensor
        else:
            rest[name] = tensor
    for layer in layers.values():
        experts = {}
        for name in [name for name in layer if EXPERT.fullmatch(name)]:
            found = EXPERT.fullmatch(name)
            experts.setdefault(found[2], {})[int(found[1])] = layer.pop(name).T
        for kind, each in experts.items():
            layer[kind] = np.stack([each[j] for j in sorted(each)])
    return rest, [layers[i] for i in sorted(layers)]


def nested(flat):
    """A tree of dictionaries, from names with dots."""
    tree = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def tunix(tensors, config):
    """The state of a model of Tunix."""
    rest, layers = by_layer(tensors)
    D, H = config.hidden_size, config.head_dim
    gemma = config.architecture.startswith("Gemma")
    found = {"embedder.input_embedding": rest["model.embed_tokens.weight"]}
    found["final_norm.scale" if gemma else "final_norm.w"] = rest["model.norm.weight"]
    if "lm_head.weight" in rest:
        found["lm_head.w"] = rest["lm_head.weight"].T
    for i, layer in enumerate(layers):
        own = {}
        q, k, v = (layer[f"self_attn.{n}_proj.weight"].T.reshape(D, -1, H) for n in "qkv")
        o = layer["self_attn.o_proj.weight"].T.reshape(-1, H, D)
        if gemma:
            own["attn.q_einsum.w"] = q.swapaxes(0, 1)
            own["attn.kv_einsum.w"] = np.stack([k.swapaxes(0, 1), v.swapaxes(0, 1)])
            own["attn.attn_vec_einsum.w"] = o
            post = "post_attn_norm" if config.architecture.startswith("Gemma2") else None
            for theirs, ours in (
                ("input_layernorm", "pre_attention_norm"),
                ("post_attention_layernorm", post or "post_attention_norm"),
                ("pre_feedforward_layernorm", "pre_ffw_norm"),
                ("post_feedforward_layernorm", "post_ffw_norm"),
            ):
                own[f"{ours}.scale"] = layer[f"{theirs}.weight"]
            if config.qk_norm:
                own["attn._query_norm.scale"] = layer["self_attn.q_norm.weight"]
                own["attn._key_norm.scale"] = layer["self_attn.k_norm.weight"]
        else:
            own |= {"attn.q_proj.w": q, "attn.k_proj.w": k, "attn.v_proj.w": v, "attn.o_proj.w": o}
            for name in ("input_layernorm", "post_attention_layernorm"):
                own[f"{name}.w"] = layer[f"{name}.weight"]
            for n in "qkv" if config.qkv_bias else "":
                own[f"attn.{n}_bias"] = layer[f"self_attn.{n}_proj.bias"]
            for n in "qk" if config.qk_norm else "":
                own[f"attn.{n}_norm.w"] = layer[f"self_attn.{n}_norm.weight"]
        if "gate" in layer:
            own["mlp.router.kernel"] = layer["mlp.gate.weight"].T
            own |= {f"mlp.{kind}_proj": layer[kind] for kind in ("gate", "up", "down")}
        else:
            for kind in ("gate", "up", "down"):
                own[f"mlp.{kind}_proj.kernel"] = layer[f"mlp.{kind}_proj.weight"].T
        found |= {f"layers.{i}.{name}": value for name, value in own.items()}
    return nested(found)


def easydel(tensors, config):
    """The state of a model of EasyDeL."""
    rest, layers = by_layer(tensors)
    found = {
        "model.embed_tokens.embedding": rest["model.embed_tokens.weight"],
        "model.norm.kernel": rest["model.norm.weight"],
    }
    if "lm_head.weight" in rest:
        found["lm_head.kernel"] = rest["lm_head.weight"].T
    for i, layer in enumerate(layers):
        for name, value in layer.items():
            kind = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}.get(name)
            name = f"mlp.experts.{kind}.weight" if kind else name
            value = value.T if value.ndim == 2 else value
            found[f"model.layers.{i}.{name.replace('weight', 'kernel')}"] = value
    return nested(found)


def maxtext(tensors, config, scanned):
    """The parameters of a model of MaxText, its layers scanned or not."""
    rest, layers = by_layer(tensors)
    name = config.architecture
    gemma2, gemma3, llama = (name.startswith(f) for f in ("Gemma2", "Gemma3", "Llama"))
    gemma = gemma2 or gemma3
    D, H = config.hidden_size, config.head_dim
    width = math.sqrt(D)
    scale = float(ml_dtypes.bfloat16(width)) if gemma3 else width if gemma2 else 1.0
    embedding = np.pad(rest["model.embed_tokens.weight"] * np.float32(scale), ((0, 28), (0, 0)))
    found = {
        "token_embedder.embedding": embedding,
        "decoder.decoder_norm.scale": rest["model.norm.weight"] + np.float32(gemma),
    }
    if "lm_head.weight" in rest:
        found["decoder.logits_dense.kernel"] = np.pad(rest["lm_head.weight"].T, ((0, 0), (0, 28)))

    def interleaved(x):
        half = H // 2
        return np.stack([x[..., :half], x[..., half:]], -1).reshape(x.shape)

    def of(layer, kind=""):
        own, attention = {}, f"self_attention{kind}"
        q, k, v = (layer[f"self_attn.{n}_proj.weight"].T.reshape(D, -1, H) for n in "qkv")
        q, k = (interleaved(q), interleaved(k)) if llama else (q, k)
        q = q / np.float32(math.sqrt(H)) if llama or gemma2 else q
        own[f"{attention}.query.kernel"] = q
        own[f"{attention}.key.kernel"] = k
        own[f"{attention}.value.kernel"] = v
        own[f"{attention}.out.kernel"] = layer["self_attn.o_proj.weight"].T.reshape(-1, H, D)
        for n, long in zip("qkv", ("query", "key", "value"), strict=True):
            if config.qkv_bias:
                own[f"{attention}.{long}.bias"] = layer[f"self_attn.{n}_proj.bias"].reshape(-1, H)
        norms = {
            "input_layernorm": "pre_self_attention_layer_norm",
            "post_attention_layernorm": "post_self_attention_layer_norm",
        }
        if gemma:
            norms = {
                "input_layernorm": f"pre_self_attention_norm{kind}",
                "post_attention_layernorm": f"post_self_attention_norm{kind}",
                "pre_feedforward_layernorm": f"pre_ffw_norm{kind}",
                "post_feedforward_layernorm": f"post_ffw_norm{kind}",
            }
        if config.qk_norm:
            norms["self_attn.q_norm"] = f"{attention}.query_norm"
            norms["self_attn.k_norm"] = f"{attention}.key_norm"
        for theirs, ours in norms.items():
            own[f"{ours}.scale"] = layer[f"{theirs}.weight"] + np.float32(gemma)
        if "gate" in layer:
            own["moe_block.gate.kernel"] = layer["mlp.gate.weight"].T
            for theirs, ours in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
                own[f"moe_block.{ours}"] = layer[theirs]
        else:
            for theirs, ours in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
                own[f"mlp{kind}.{ours}.kernel"] = layer[f"mlp.{theirs}_proj.weight"].T
        return own

    if gemma2:
        pairs = zip(layers[::2], layers[1::2], strict=True)
        layers = [of(local, "_local") | of(full, "_global") for local, full in pairs]
    else:
        layers = [of(layer) for layer in layers]

    def stack(start, some):
        for key in some[0]:
            found[f"{start}.{key}"] = np.stack([layer[key] for layer in some], 1)

    def number(start, some):
        for i, layer in enumerate(some):
            found.update({f"{start}{i}.{key}": value for key, value in layer.items()})

    if not scanned:
        number("decoder.layers_", layers)
    elif gemma3:
        whole = len(layers) // 6 * 6
        for block in range(6 if whole else 0):
            stack(f"decoder.layers.layers_{block}", layers[block:whole:6])
        number("decoder.layers_remainder.layers_", layers[whole:])
    else:
        stack("decoder.layers", layers)
    return nested({f"params.params.{key}": value for key, value in found.items()})
