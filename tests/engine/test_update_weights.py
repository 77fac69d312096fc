"""New weights in a running engine: its tokens are those of an engine that started with them."""

import json
import mmap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from rjax.engine.named_prefixes import SHARED_PREFIX
from rjax.engine.protocol import KeepAs
from rjax.errors import EngineDeadError, EnginePausedError, InvalidWeightsError
from rjax.models import config_from_dict
from rjax.sampling import RequestOutputKind, SamplingParams
from tests.models.trainers import checkpoint, maxtext

from .invariants import check
from .tiny import CONFIG, make_engine, run
from .virtual_devices import run_on_virtual_devices

pytestmark = [
    pytest.mark.usefixtures("kept"),
    pytest.mark.usefixtures("no_annotations_checked"),
]

PREFIX = list(range(3, 27))
PROMPTS = [[*PREFIX, 1], [*PREFIX, 2, 9], [5] * 11, [7]]
MOE = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
HYBRID = CONFIG | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
WIDE = CONFIG | {"hidden_size": 64, "intermediate_size": 256, "head_dim": 32}
TIED = CONFIG | {"tie_word_embeddings": True}


def requests(count=8, **params):
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **params)
    return [(str(i), prompt, greedy) for i, prompt in enumerate(PROMPTS)]


def weights(fields, seed):
    """Tensors of a checkpoint; equal seeds give equal ones."""
    tensors = checkpoint(config_from_dict(fields), seed)
    return {name: np.float32(0.3) * tensor for name, tensor in tensors.items()}


def folder(path, fields, seed=1):
    """A checkpoint with weights of this seed."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    save_file(weights(fields, seed), path / "model.safetensors")
    return path


def answers(engine):
    done = run(engine, requests())
    return {name: output.outputs[0].token_ids for name, output in done.items()}


def update(engine, new, mode="wait", **how):
    engine.start_weight_update(**how)
    engine.add_weights(new)
    return engine.finish_weight_update(mode)


@pytest.fixture
def engine(tmp_path):
    """An engine with the weights of seed 1."""
    return make_engine(folder(tmp_path / "model", CONFIG), load_format="auto", num_pages=40)


@pytest.mark.sample(1, 4)
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        pytest.param(WIDE, {"quantization": "fp8"}, id="fp8"),
        pytest.param(MOE, {"dtype": "float32"}, id="experts"),
        pytest.param(HYBRID, {"dtype": "float32", "num_states": 40}, id="states"),
        pytest.param(CONFIG, {"dtype": "float32"}, id="float32"),
        pytest.param(CONFIG, {"dtype": "bfloat16"}, id="bfloat16"),
        pytest.param(WIDE, {"quantization": "int4", "dtype": "bfloat16"}, id="int4"),
        pytest.param(TIED, {}, id="tied"),
        pytest.param(MOE, {"quantization": "fp8"}, id="experts-fp8"),
    ],
)
def test_tokens_are_those_of_an_engine_that_started_with_the_weights(fields, options, tmp_path):
    options = {"load_format": "auto", "num_pages": 40} | options
    old = make_engine(folder(tmp_path / "old", fields), **options)
    new = make_engine(folder(tmp_path / "new", fields, 2), **options)
    first, right = answers(old), answers(new)
    assert first != right
    programs = old._worker.num_compiled
    given = weights(fields, 2)
    assert update(old, given) == 1
    assert answers(old) == right
    assert update(old, {name: jnp.asarray(tensor) for name, tensor in given.items()}) == 2
    assert answers(old) == right
    assert old._worker.fingerprint() == new._worker.fingerprint()
    assert update(old, weights(fields, 1)) == 3
    assert answers(old) == first
    assert old._worker.num_compiled == programs, "the steps are compiled once"


_TWO_DEVICES = """
import jax, numpy as np, pathlib, sys
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.engine.test_update_weights import CONFIG, MOE, WIDE, answers, folder, update, weights
from tests.engine.tiny import make_engine
path = pathlib.Path(sys.argv[1])
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
fields, options = {
    "plain": (CONFIG, {}), "fp8": (WIDE, {"quantization": "fp8"}), "experts": (MOE, {}),
    "whole experts": (MOE, {"enable_expert_parallel": True}),
}[sys.argv[2]]
options = {"load_format": "auto", "num_pages": 40, "tensor_parallel_size": 2, **options}
old = make_engine(folder(path / "old", fields), **options)
new = make_engine(folder(path / "new", fields, 2), **options)
first, right = answers(old), answers(new)
given = weights(fields, 2)
update(old, given)
assert answers(old) == right != first
update(old, weights(fields, 1))
sharded = {
    key: jax.device_put(value, NamedSharding(
        mesh, PartitionSpec("fsdp") if value.shape[0] % 2 == 0 else PartitionSpec()
    ))
    for key, value in given.items()
}
update(old, sharded)
assert answers(old) == right
update(old, weights(fields, 1))
update(old, {key: jax.device_put(value, jax.devices()[1]) for key, value in given.items()})
assert answers(old) == right
print("done")
"""


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("fp8", marks=pytest.mark.thorough),
        *(pytest.param(w, marks=pytest.mark.slow) for w in ("plain", "experts", "whole experts")),
    ],
)
def test_two_devices_and_arrays_of_another_mesh(what, tmp_path):
    program = f"import sys; sys.argv = ['', {str(tmp_path)!r}, {what!r}]\n" + _TWO_DEVICES
    assert run_on_virtual_devices(program, 2).strip().endswith("done")


@pytest.mark.thorough
def test_a_trainers_scanned_tree_updates_an_engine(engine, tmp_path):
    given = weights(CONFIG, 2)
    right = answers(make_engine(folder(tmp_path / "new", CONFIG, 2), load_format="auto"))
    tree = maxtext(given, config_from_dict(CONFIG), scanned=True)
    tree = jax.tree.map(jnp.asarray, tree)
    update(engine, tree, mapping="maxtext")
    assert answers(engine) == right  # the values are the same but for rounding


@pytest.mark.thorough
def test_parts_arrive_in_any_number_and_some_tensors_alone(engine, tmp_path):
    first, second = weights(CONFIG, 1), weights(CONFIG, 2)
    engine.start_weight_update()
    for name, tensor in second.items():
        engine.add_weights([(name, tensor)])
        assert engine.weights_version == 0
    assert engine.finish_weight_update() == 1
    name = "model.layers.1.self_attn.k_proj.weight"
    update(engine, {name: first[name]}, partial=True)
    path = folder(tmp_path / "mixed", CONFIG, 2)
    save_file(second | {name: first[name]}, path / "model.safetensors")
    assert answers(engine) == answers(make_engine(path, load_format="auto"))


def test_kv_of_old_weights_serves_nobody(engine):
    run(engine, requests())
    assert run(engine, requests())["0"].num_cached_tokens > 0
    keys = set(engine._blocks._page_of)
    assert keys
    update(engine, weights(CONFIG, 1))  # the same values, which nobody can know
    assert engine._blocks.counts().cached == engine._blocks.counts().used == 0
    assert run(engine, requests()[:1])["0"].num_cached_tokens == 0
    assert not keys & set(engine._blocks._page_of)
    assert run(engine, requests()[:1])["0"].num_cached_tokens > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("steps", [3, 1, 6])
@pytest.mark.parametrize("options", [{}, {"num_decode_steps": 4}], ids=["", "multi-step"])
def test_running_requests_wait_end_or_keep_their_kv(steps, options, tmp_path):
    engine = make_engine(folder(tmp_path / "m", CONFIG), load_format="auto", **options)
    first = answers(engine)
    engine.reset_prefix_cache()
    cumulative = [*requests(12, output_kind=RequestOutputKind.CUMULATIVE)]
    for version, mode in enumerate(("wait", "keep", "abort"), 1):
        for request in cumulative[:3]:
            engine.add_request(*request)
        outputs = []
        for _ in range(steps):
            outputs += engine.step()
        running = set(engine._requests)
        engine.add_request(*cumulative[3])  # it has not started
        assert update(engine, weights(CONFIG, 1 + version % 2), mode) == version
        kept = set(engine._requests)
        check(engine)
        while engine.has_unfinished_requests():
            outputs += engine.step()
            check(engine)
        done = {output.request_id: output.outputs[0] for output in outputs if output.finished}
        for name, output in done.items():
            assert len(output.weights_versions) == len(output.token_ids)
            if name == "3":
                assert set(output.weights_versions) == {version}
            elif mode == "wait":
                assert set(output.weights_versions) == {version - 1}
                assert output.token_ids[:8] == first[name]
            elif mode == "keep":
                assert set(output.weights_versions) <= {version - 1, version}
                assert output.weights_versions == sorted(output.weights_versions)
                assert name not in kept or output.weights_versions[-1] == version
            else:
                assert (output.finish_reason == "abort") == (name in running)
                assert set(output.weights_versions) <= {version - 1}
            assert mode == "abort" or output.finish_reason == "length"
        engine.reset_prefix_cache()
        assert engine._blocks.counts().free == engine._worker.pool.num_pages


def test_an_update_waits_for_running_requests_and_starts_no_others(engine):
    engine.add_request(*requests(6)[0])
    engine.step()
    engine.add_request(*requests(6)[1])
    engine.start_weight_update()
    engine.add_weights(weights(CONFIG, 2))
    outputs = []
    while engine.try_finish_weight_update("wait") is None:
        assert [s.request_id for s in engine._scheduler.running] == ["0"]
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"0"}
    assert engine.weights_version == 1
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].weights_versions == [1] * 6


def test_a_request_finds_no_kv_from_before_its_start(engine):
    def sequence(name):
        return engine._requests[name].sequences[0]

    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for version, name in enumerate(("first", "second", "third")):
        if version:
            update(engine, weights(CONFIG, 1 + version % 2), mode="keep")
        engine.add_request(name, PREFIX, params)
        engine.step()
    old = {page for name in ("first", "second") for page in sequence(name).pages[0]}
    engine._scheduler.preempt(sequence("second"), may_swap=False)
    engine._scheduler.preempt(sequence("third"), may_swap=False)
    while not (sequence("second").pages and sequence("third").pages):
        engine.step()
        check(engine)
    assert not old & set(sequence("third").pages[0])
    assert not set(sequence("first").pages[0]) & set(sequence("second").pages[0])
    assert run(engine, []).keys() == {"first", "second", "third"}


def test_no_prefix_is_computed_while_an_update_waits(engine, tmp_path):
    engine.add_prefix("unloaded", [9] * 10)
    update(engine, weights(CONFIG, 1))
    engine.add_request(*requests(6)[0])
    engine.step()
    engine.start_weight_update()
    engine.add_weights(weights(CONFIG, 2))
    assert engine.try_finish_weight_update("wait") is None
    for call in (
        lambda: engine.add_prefix("new", PREFIX),
        lambda: engine.set_shared_prefix(PREFIX),
        lambda: engine.save_prefix("unloaded", tmp_path / "saved"),
    ):
        with pytest.raises(EnginePausedError, match="an update of the weights waits"):
            call()
    assert engine.finish_weight_update("wait") == 2
    engine.add_prefix("new", PREFIX)
    engine.save_prefix("unloaded", tmp_path / "saved")
    assert all(prefix.pages for prefix in engine.prefixes())
    assert list(run(engine, [])) == ["0"]


@pytest.mark.thorough
def test_an_update_that_waits_can_be_cancelled(engine):
    engine.add_request(*requests(6)[0])
    engine.step()
    engine.start_weight_update()
    engine.add_weights(weights(CONFIG, 2))
    assert engine.try_finish_weight_update("wait") is None
    engine.cancel_weight_update()
    assert len(run(engine, requests(3)[1:])) == 4
    assert engine.weights_version == 0


def test_prefixes_are_computed_again_when_they_are_first_used(engine, tmp_path):
    right = answers(make_engine(folder(tmp_path / "new", CONFIG, 2), load_format="auto"))
    engine.add_prefix("unused", [9] * 10)
    engine.add_prefix("named", PREFIX)
    engine.set_shared_prefix([5] * 11)
    engine.save_prefix("named", tmp_path / "old")
    update(engine, weights(CONFIG, 2))
    assert [bool(prefix.pages) for prefix in engine.prefixes()] == [False, False]
    assert not engine.pinned_pages()
    assert answers(engine) == right
    assert [bool(prefix.pages) for prefix in engine.prefixes()] == [False, True]
    assert engine._prefixes.pinned.get(SHARED_PREFIX).pages
    check(engine)
    engine.reset_prefix_cache()
    done = run(engine, [("x", [1], SamplingParams(temperature=0, max_tokens=2))])
    engine.add_request("y", [1], SamplingParams(temperature=0, max_tokens=2), prefix="named")
    outputs = engine.step() + engine.step() + engine.step()
    assert done["x"].num_cached_tokens == 0
    assert outputs[-1].num_cached_tokens == len(PREFIX)
    engine.save_prefix("unused", tmp_path / "new.prefix")  # fills it first
    assert engine.load_prefix(tmp_path / "new.prefix", "again").pages
    with pytest.raises(ValueError, match="save the prefix again"):
        engine.load_prefix(tmp_path / "old")
    update(engine, weights(CONFIG, 1))
    engine.drop_prefix("named")
    assert len(run(engine, requests())) == 4
    check(engine)


@pytest.mark.thorough
def test_a_prefix_of_a_request_that_keeps_its_kv_is_computed_again(engine):
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request("a", PREFIX, greedy, keep_as=KeepAs("p"))
    engine.step()
    engine.add_request("b", [8] * 9, greedy, keep_as=KeepAs("q"))  # it has not started
    update(engine, weights(CONFIG, 2), "keep")
    while engine.has_unfinished_requests():
        engine.step()
    assert {prefix.name: bool(prefix.pages) for prefix in engine.prefixes()} == {
        "p": False,
        "q": True,
    }
    run(engine, [("c", [*PREFIX, 4], greedy)])
    assert engine._prefixes.pinned.get("p").pages
    check(engine)


@pytest.mark.sample(2)
@pytest.mark.parametrize("what", ["missing", "NaN", "shape", "mode", "iterator", "twice", "none"])
def test_a_lying_or_killed_trainer_changes_nothing(what, engine):
    first, print_before = answers(engine), engine._worker.fingerprint()
    given = weights(CONFIG, 2)
    name = "model.layers.1.mlp.down_proj.weight"

    def broken():
        yield from list(given.items())[:3]
        raise RuntimeError("the trainer was killed")

    def lie():
        if what == "iterator":
            engine.add_weights(broken())
        if what != "none":
            engine.add_weights({n: t for n, t in given.items() if n != name})
        bad = given[name].copy()
        bad[3, 4] = np.nan
        if what in ("NaN", "shape", "mode", "twice"):
            engine.add_weights({name: {"NaN": bad, "shape": bad.T}.get(what, given[name])})
        if what == "twice":
            engine.add_weights({name: given[name]})
        engine.finish_weight_update("at once" if what == "mode" else "keep")

    engine.start_weight_update()
    with pytest.raises(InvalidWeightsError, match="is under way; finish or cancel it"):
        engine.start_weight_update()
    with pytest.raises(RuntimeError if what == "iterator" else InvalidWeightsError):
        lie()
    with pytest.raises(InvalidWeightsError, match="no update of the weights is under way"):
        engine.finish_weight_update()
    assert engine.weights_version == 0
    assert engine._worker.fingerprint() == print_before
    assert run(engine, requests())["0"].num_cached_tokens > 0, "the cache is in use"
    engine.reset_prefix_cache()
    assert answers(engine) == first
    assert update(engine, given) == 1


def test_an_engine_whose_devices_fail_half_way_is_of_no_use(engine, monkeypatch):
    engine.add_request(*requests()[0])
    commit = engine._worker._adopter.commit

    def fail(checked, leaves):
        del checked.staged["model.norm.weight"]
        commit(checked, leaves)

    monkeypatch.setattr(engine._worker._adopter, "commit", fail)
    with pytest.raises(EngineDeadError, match="failed half-way"):
        update(engine, weights(CONFIG, 2))
    assert engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError, match="make a new engine, or restart the server"):
        engine.step()
    engine.close()


@pytest.mark.thorough
def test_two_hundred_updates_keep_no_memory(tmp_path):
    large = CONFIG | {"hidden_size": 256, "intermediate_size": 1024}  # 7 MB
    engine = make_engine(folder(tmp_path / "m", large), load_format="auto", num_pages=40)
    given = [weights(large, seed) for seed in (1, 2)]
    right, live, resident = [], [], []
    for count in range(200):
        update(engine, given[count % 2])
        right.append(answers(engine))
        counts = engine._blocks.counts()
        assert counts.used == 0
        live.append((len(jax.live_arrays()), sum(a.nbytes for a in jax.live_arrays())))
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE)
        if count == 1:
            programs = engine._worker.num_compiled
    assert set(live[1:]) == {live[1]}
    assert engine._worker.num_compiled == programs
    assert right[0] != right[1]
    assert right == right[:2] * 100
    one_copy = sum(tensor.nbytes for tensor in given[0].values())
    assert resident[-1] - resident[50] < 10 * one_copy, "of 150 updates, none stays"
    engine.reset_prefix_cache()
    assert engine._blocks.counts().free == engine._worker.pool.num_pages
