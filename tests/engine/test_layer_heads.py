"""Layers with heads of their own: several share a page, each with a part of it."""

import numpy as np
import pytest

from rjax.batch.page_groups import (
    LayerPlace,
    page_groups,
    pages_held,
    with_shared_kv,
    with_states,
)
from rjax.models import config_from_folder
from rjax.sampling import SamplingParams
from rjax.worker.engine_plan import groups_of
from rjax.worker.fingerprint import model_fingerprint
from rjax.worker.pages.pools import page_shape

from .recorded import TESTS
from .test_families import greedy, prompts
from .test_windows import poison
from .tiny import make_engine, run
from .virtual_devices import run_on_virtual_devices

pytestmark = pytest.mark.usefixtures("no_annotations_checked")

MODELS = TESTS / "golden" / "families" / "models"
# Pages hold three sliding layers or two full ones; two layers attend over the KV of others.
SHARED_KV = MODELS / "gemma4_g2_h16_inputs_shared_kv"
# Pages hold three sliding layers or a full one; its window is longer than a page.
EXPERTS = TESTS / "golden" / "multimodal" / "models" / "gemma4vl_j5_k2_inputs"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize(
    ("layers", "sliding", "full", "waste"),
    [(60, (16, 256), (4, 512), 1.0), (30, (8, 256), (2, 512), 1.2), (48, (8, 256), (1, 512), 1.0)],
    ids=["31B", "26B-A4B", "12B"],
)
@pytest.mark.parametrize("length", [1024, 262_144])
def test_pages_of_gemma_4(layers, sliding, full, waste, length):
    windows = tuple(None if i % 6 == 5 else 1024 for i in range(layers))
    heads = tuple(full if window is None else sliding for window in windows)
    found = page_groups(windows, page_size=64, max_model_len=length, heads=heads)
    places = [found.place(layer) for layer in range(layers)]
    assert len(set(places)) == layers
    for place, (K, H) in zip(places, heads, strict=True):
        assert place.part < place.parts and place.parts * K * H == 16 * 256 * sliding[0] // 16
    kept = {place.group: window for place, window in zip(places, windows, strict=True)}
    assert tuple(kept[group] for group in sorted(kept)) == found.windows
    taken = found.num_pools * pages_held(found.windows, length, 64) * sliding[0] * 256
    needed = sum(
        pages_held([window], length, 64) * K * H
        for window, (K, H) in zip(windows, heads, strict=True)
    )
    assert needed <= taken <= 1.1 * waste * needed


def test_layers_without_kv_of_their_own():
    groups = page_groups((4, None), page_size=8, max_model_len=64, heads=((2, 8), (1, 8)))
    assert groups.layers_a_page == (2, 1) and groups.num_pools == 1
    shared = with_shared_kv(groups, (0, 1, 0, 1))
    assert [shared.place(layer) for layer in (2, 3)] == [shared.place(0), shared.place(1)]
    assert shared.layers_of(4) == 2
    states = with_states(groups, (False, True, False))
    assert states.place(2) == LayerPlace(0, 0, 0, 2)


def test_the_page_of_an_array_has_the_heads_of_its_layers():
    config = config_from_folder(SHARED_KV)
    groups = groups_of(config, page_size=8, max_model_len=64)
    assert groups.layers_a_page == (2, 3)
    assert page_shape(config, groups, 8) == (4, 8, 24)  # of two layers with 2 heads


def saved_and_loaded(engine, folder, path) -> None:
    """A prefix from a file, in pages that nobody has written, serves the tokens that it did."""
    prompt = prompts()[1]
    wanted = run(engine, [("w", prompt, GREEDY)])["w"].outputs[0].token_ids
    engine.add_prefix("shared", prompt[:24])
    engine.save_prefix("shared", path)
    other = make_engine(folder, **OPTIONS)
    poison(other)
    other.load_prefix(path)
    found = run(other, [("p", prompt, GREEDY)])["p"]
    assert found.num_cached_tokens == 24 and found.outputs[0].token_ids == wanted
    other.close()


OPTIONS = {
    "load_format": "auto",
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "num_pages": 40,
    "enable_relay_attention": "on",
    "check_values": True,
}


@pytest.mark.thorough
def test_unowned_pages_and_saved_prefixes_change_no_token(tmp_path):
    engine = make_engine(EXPERTS, **OPTIONS)
    for i, prompt in enumerate(prompts()):
        engine.add_request(str(i), prompt, GREEDY)
    done = {}
    while engine.has_unfinished_requests():
        poison(engine)
        done |= {o.request_id: o for o in engine.step() if o.finished}
    assert [done[str(i)].outputs[0].token_ids for i in range(5)] == greedy(EXPERTS)
    assert engine.stats().cached_tokens > 0
    saved_and_loaded(engine, EXPERTS, tmp_path / "prefix")
    engine.close()


@pytest.mark.slow
def test_swapped_pages_in_fp8_come_back():
    longer = SamplingParams(temperature=0, max_tokens=22, ignore_eos=True)
    tokens = []
    for num_pages in (60, 17):
        options = {"num_pages": num_pages, "preemption": "swap", "kv_cache_dtype": "fp8"}
        engine = make_engine(EXPERTS, **OPTIONS | options)
        done = run(engine, [(str(i), p, longer) for i, p in enumerate(prompts())])
        tokens.append([done[str(i)].outputs[0].token_ids for i in range(5)])
        assert (engine.stats().swaps > 0) == (num_pages == 17)
        engine.close()
    assert tokens[0] == tokens[1]


_MESH = """
import jax
import numpy as np
from tests.engine.test_layer_heads import EXPERTS, GREEDY, MODELS, OPTIONS, prompts
from tests.engine.tiny import make_engine, run
from rjax.models import DenseAttention, load_model

def answers(devices):
    options = OPTIONS | {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    engine = make_engine(EXPERTS, tensor_parallel_size=devices, **options)
    done = run(engine, [(str(i), p, GREEDY) for i, p in enumerate(prompts())])
    engine.close()
    return [done[str(i)].outputs[0].token_ids for i in range(5)]

assert answers(1) == answers(2)

def logits(name, devices):
    mesh = jax.make_mesh((devices,), ("tensor",), devices=jax.devices()[:devices],
                         axis_types=(jax.sharding.AxisType.Auto,))
    model = load_model(MODELS / name, dtype="float32", mesh=mesh, progress=False).model
    ids = np.arange(3, 40, dtype=np.int32)
    return np.asarray(jax.jit(lambda: model.logits(model(ids, np.arange(37), DenseAttention())))())

# One KV head in full layers, which both devices hold; and values that are no keys.
for name in ("gemma4_g6_h32_keys_are_values", "gemma4_g2_h16_inputs_shared_kv"):
    one, two = logits(name, 1), logits(name, 2)
    np.testing.assert_allclose(one, two, atol=1e-4 * np.abs(one).max())
print("same")
"""


@pytest.mark.thorough
def test_two_devices_give_the_tokens_of_one():
    assert run_on_virtual_devices(_MESH, 2).endswith("same\n")


def test_pages_of_several_devices_are_not_those_of_one():
    """Each device has its heads of one layer after the other."""
    config = config_from_folder(SHARED_KV)
    assert model_fingerprint(config, []) == model_fingerprint(config, [], devices_of_pages=1)
    assert model_fingerprint(config, []) != model_fingerprint(config, [], devices_of_pages=2)


def test_random_places_never_overlap():
    draw = np.random.default_rng(5)
    kinds = (None, 8, 16)
    for _ in range(200):
        of_kind = {kind: (int(draw.integers(1, 5)), int(draw.integers(1, 5))) for kind in kinds}
        chosen = draw.integers(0, 3, draw.integers(1, 12)).tolist()
        windows = tuple(kinds[i] for i in chosen)
        heads = tuple(of_kind[window] for window in windows)
        found = page_groups(windows, page_size=4, max_model_len=64, heads=heads)
        places = [found.place(layer) for layer in range(len(windows))]
        assert len(set(places)) == len(windows)
        if len(set(heads)) > 1:
            numbers = {p.parts * K * H for p, (K, H) in zip(places, heads, strict=True)}
            assert len(numbers) == 1, "every page has the same size"
