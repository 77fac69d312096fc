"""The fit of the cost model: known costs come back, and the file is where engines look."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.kernels import cost_model as command
from bench.kernels.cases.attention import make_plan
from bench.kernels.pool_runner import PoolRunner
from rjax.models import config_from_dict
from rjax.models.sharding import single_device_mesh
from rjax.pallas_kernels.attention.plan.host import CostModel
from rjax.worker import cost_model
from rjax.worker.backend import choose_backend

pytestmark = pytest.mark.usefixtures("quickly_compiled_random_numbers")

TRUE = CostModel(
    single_row_item=0.4, single_row_token=0.002, multi_row_item=0.9, multi_row_token=0.0035
)
LAUNCH = 5.0
CASES = command.pairs(32, 8, 128, 64, 32, small=False)


def timer(noise: float, model: CostModel = TRUE):
    """Seconds that the true costs give, some of them wrong by as much as ``noise``."""
    rng = np.random.default_rng(0)

    def measure(case):
        table = np.arange(case.batch)[:, None] * 10_000 + np.arange(case.context[0] // case.S + 1)
        shared = case.shared // case.S
        table[:, :shared] = table[0, :shared]
        plan = make_plan(case, table.astype(np.int32))
        costs = (
            LAUNCH,
            model.single_row_item,
            model.single_row_token,
            model.multi_row_item,
            model.multi_row_token,
        )
        exact = float(command.item_counts(plan) @ np.array(costs))
        return 1e-6 * exact * (1 + noise * rng.uniform(-1, 1)), plan

    return measure


def test_exact_times_give_the_costs_back():
    found = command.fit(CASES, timer(0))
    for name in ("single_row_item", "single_row_token", "multi_row_item", "multi_row_token"):
        assert getattr(found.model, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    assert found.launch_us == pytest.approx(LAUNCH, rel=1e-6)
    assert found.worst_error < 1e-9
    assert found.decisions == found.right > 3


def test_noisy_times_give_them_nearly_and_say_how_wrong():
    found = command.fit(CASES, timer(0.05))
    assert found.model.single_row_token == pytest.approx(TRUE.single_row_token, rel=0.05)
    assert found.model.multi_row_token == pytest.approx(TRUE.multi_row_token, rel=0.05)
    assert 0.005 < found.mean_error <= found.worst_error < 0.08


def test_a_cost_below_nothing_becomes_nothing():
    found = command.fit(CASES, timer(0, CostModel(-0.05, 0.002, 0.9, 0.0035)))
    assert found.model.single_row_item == 0
    assert found.model.single_row_token == pytest.approx(0.002, rel=0.2)


def test_costs_decide_as_the_times_do():
    """The fitted model is right if reading a prefix once is slower."""
    dear = CostModel(
        single_row_item=0.1, single_row_token=0.001, multi_row_item=0.5, multi_row_token=0.006
    )
    found = command.fit(CASES, timer(0.01, dear))
    pays = found.model.sharing_pays(np.array([2, 5, 8, 32]), 32, 2048)
    assert pays.tolist() == [False, False, True, True]
    assert found.right == found.decisions


@pytest.mark.slow
def test_the_command_keeps_a_fit_that_the_engine_finds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cost_model, "FOLDER", str(tmp_path / "cache"))
    timed, known = PoolRunner.measure, timer(0)

    def measure(self, case):  # run and checked; but the times of a busy CPU fit nothing
        _, error, plan = timed(self, case)
        return known(case)[0], error, plan

    monkeypatch.setattr(PoolRunner, "measure", measure)
    monkeypatch.setattr(PoolRunner, "_seconds", lambda self, chain: 1.0)  # nor are they needed
    path = tmp_path / "costs.json"
    command.main(
        [
            "--small",
            "--backend=xla",
            "--heads=4,2,8",
            "--page-size=16",
            f"--json={path}",
        ]
    )
    (row,) = json.loads(path.read_text())["rows"]
    assert row["device"] == jax.devices()[0].device_kind
    config = shapes(4, 2, 8)
    backend = backend_of(config)
    found = cost_model.fitted_cost_model(backend, config, jnp.float32, single_device_mesh())
    assert found is not None
    assert found.single_row_token == row["single_row_token"]
    assert "held out" in capsys.readouterr().out
    assert [p.suffix for p in Path(tmp_path / "cache").iterdir()] == [".json"]


@pytest.mark.thorough
def test_times_that_fit_nothing_are_not_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cost_model, "FOLDER", str(tmp_path / "cache"))
    known = timer(0, CostModel(-1e-3, -1e-5, 0.9, 0.0035))  # more items, less time

    def measure(self, case):
        return known(case)[0], 0.0, self._plan(case, self._tables(case)[0])

    monkeypatch.setattr(PoolRunner, "measure", measure)
    arguments = ["--small", "--backend=xla", "--heads=4,2,8", "--page-size=16"]
    assert command.main([*arguments, f"--json={tmp_path / 'costs.json'}"]) == 1
    assert "nothing is saved" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def backend_of(config):
    return choose_backend(
        "xla",
        platform="cpu",
        compute_capability=None,
        model=config,
        dtype=jnp.float32,
        page_size=16,
    )


def shapes(N, K, H):
    return config_from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": N * H,
            "intermediate_size": 2 * N * H,
            "num_hidden_layers": 1,
            "num_attention_heads": N,
            "num_key_value_heads": K,
            "head_dim": H,
            "vocab_size": 64,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "torch_dtype": "float32",
        }
    )
