"""Fitted cost models: kept, found again by the engine that they fit, refused by any other."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from rjax.functional import prepare
from rjax.models import config_from_dict, init_model
from rjax.models.sharding import single_device_mesh
from rjax.pallas_kernels.attention.plan.host import CostModel
from rjax.worker import cost_model
from rjax.worker.backend import choose_backend
from rjax.worker.cost_model import Fitted, fitted_cost_model, keep_cost_model

from .tiny import CONFIG, make_engine

MODEL = CostModel(
    single_row_item=3.0, single_row_token=0.5, multi_row_item=4.0, multi_row_token=0.25
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cost_model, "FOLDER", str(tmp_path))
    return tmp_path


def key(**change) -> Fitted:
    made = Fitted(
        device=jax.devices()[0].device_kind,
        backend="xla",
        N=CONFIG["num_attention_heads"],
        K=CONFIG["num_key_value_heads"],
        H=CONFIG["head_dim"],
        dtype="float32",
        tile_rows=16,
    )
    return dataclasses.replace(made, **change)


def look() -> CostModel | None:
    config = config_from_dict(CONFIG)
    backend = choose_backend(
        "xla",
        platform="cpu",
        compute_capability=None,
        model=config,
        dtype=jnp.float32,
        page_size=8,
    )
    return fitted_cost_model(backend, config, jnp.float32, single_device_mesh())


def test_an_engine_takes_the_fit_of_its_device(tiny):
    assert look() is None
    before = make_engine(tiny)
    keep_cost_model(key(), MODEL, made_by="a test")
    assert look() == MODEL
    assert make_engine(tiny)._worker.input_builder.sharing == MODEL
    assert before._worker.input_builder.sharing not in (MODEL, "on", "off")
    assert make_engine(tiny, enable_relay_attention="on")._worker.input_builder.sharing == "on"


def test_the_functional_engine_takes_it_too():
    config = config_from_dict(CONFIG)
    model = init_model(config, dtype=jnp.float32)
    keep_cost_model(key(), MODEL)
    assert prepare(model, max_context=64, page_size=8)[0].relay == MODEL
    assert prepare(model, max_context=64, page_size=8, relay="off")[0].relay == "off"


@pytest.mark.parametrize("change", [{"backend": "mosaic"}, {"K": 4}, {"H": 16}, {"dtype": "int8"}])
def test_other_heads_and_backends_have_files_of_their_own(change):
    path = keep_cost_model(key(**change), MODEL)
    assert path != keep_cost_model(key(), MODEL)
    path.replace(path.with_name(key().file_name))
    with pytest.warns(UserWarning, match="it is for " + next(iter(change))):
        assert look() is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("[1]", "no JSON object"),
        ("{}", "it is for device None"),
        ('"x', "Unterminated"),
        (b"\xff\xfe\x00", "codec"),
    ],
)
def test_a_broken_file_is_named_and_not_used(folder, text, why):
    path = folder / key().file_name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.warns(UserWarning, match=f"{path.name} is not used: .*{why}.*fit it again"):
        assert look() is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"multi_row_item": -1}, "multi_row_item is -1"),
        ({"multi_row_token": float("nan")}, "multi_row_token is nan"),
        ({"single_row_token": float("inf")}, "single_row_token is inf"),
        ({"single_row_item": None}, "single_row_item is None"),
        ({"single_row_item": 0, "single_row_token": 0}, "cost nothing"),
        ({"device": "another"}, "it is for device 'another'"),
        ({"tile_rows": 32}, "it is for tile_rows 32"),
    ],
)
def test_numbers_that_cannot_be_are_refused(change, why):
    path = keep_cost_model(key(), MODEL)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.warns(UserWarning, match=why):
        assert look() is None
