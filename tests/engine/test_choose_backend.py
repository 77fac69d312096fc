"""Which backend an engine takes, and what it says of those it cannot take."""

import sys
import types

import pytest

from rjax.errors import InvalidConfigError
from rjax.models import config_from_dict
from rjax.worker.backend import choose_backend

from .tiny import CONFIG


def choose(name, *, head_dim=64, **change):
    settings = {
        "platform": "gpu",
        "compute_capability": 9.0,
        "model": config_from_dict(CONFIG | {"head_dim": head_dim}),
        "dtype": "bfloat16",
        "page_size": 64,
    }
    return choose_backend(name, **settings | change)


@pytest.fixture
def jax_triton(monkeypatch):
    """A machine with jax-triton, which is importable only beside jax's GPU support."""
    pytest.importorskip("triton")
    module = types.ModuleType("jax_triton")
    vars(module)["__version_info__"] = (0, 3, 1)
    monkeypatch.setitem(sys.modules, "jax_triton", module)


@pytest.fixture
def no_jax_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)


NOT_MOSAIC = [
    ({"platform": "cpu", "compute_capability": None}, "Hopper"),
    ({"compute_capability": 8.0}, "Hopper"),
    ({"compute_capability": 12.0}, "Hopper"),
    ({"dtype": "float32"}, "float32"),
    ({"page_size": 8}, "pages of"),
    ({"head_dim": 48}, "head dims 64, 80, .*256, 512, not 48"),
]


@pytest.mark.parametrize(("change", "message"), NOT_MOSAIC)
def test_mosaic_says_what_it_cannot_run(no_jax_triton, change, message):
    assert choose("auto", **change).name == "xla"
    with pytest.raises(InvalidConfigError, match=message):
        choose("mosaic", **change)


FP8 = {"kv_dtype": "float8_e4m3fn"}


@pytest.mark.parametrize("head_dim", [80, 112])
def test_kv_in_fp8_takes_the_next_backend_where_mosaic_cannot(jax_triton, head_dim):
    assert choose("auto", head_dim=head_dim, **FP8).name == "triton"
    with pytest.raises(InvalidConfigError, match=f"KV in fp8, head dims 64, 96.*not {head_dim}"):
        choose("mosaic", head_dim=head_dim, **FP8)


def test_kv_in_fp8_without_triton_is_told_of(no_jax_triton, caplog):
    assert choose("auto", head_dim=80, **FP8).name == "xla"
    assert "KV in fp8" in caplog.text and 'pip install "jax-triton<0.4"' in caplog.text


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_mosaic_takes_kv_in_fp8(head_dim):
    assert choose("auto", head_dim=head_dim, **FP8).name == "mosaic"
    with pytest.raises(InvalidConfigError, match="not float32"):
        choose("mosaic", head_dim=head_dim, dtype="float32", **FP8)


@pytest.mark.parametrize("name", ["auto", "mosaic"])
def test_mosaic_is_taken_on_hopper(jax_triton, name):
    backend = choose(name)
    assert backend.name == "mosaic"
    assert backend.tuning.tile_rows == 64  # G = 2


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_mosaic_takes_its_head_dims(head_dim):
    assert choose("auto", head_dim=head_dim).name == "mosaic"


@pytest.mark.parametrize(
    "change",
    [{"compute_capability": 8.0}, {"compute_capability": 8.9}, {"page_size": 8}, {"head_dim": 48}],
)
@pytest.mark.parametrize("name", ["auto", "triton"])
def test_triton_is_taken_where_mosaic_cannot(jax_triton, name, change):
    backend = choose(name, **change)
    assert backend.name == "triton"
    assert backend.tuning.tile_rows == 32  # G = 2


def test_triton_by_name_on_hopper(jax_triton):
    assert choose("triton").name == "triton"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"platform": "cpu", "compute_capability": None}, "Ampere"),
        ({"compute_capability": 7.5}, "Ampere"),
        ({"compute_capability": 12.0}, "Ampere"),
        ({"dtype": "float32", "compute_capability": 8.0}, "float32"),
        ({"head_dim": 40, "compute_capability": 8.0}, "not 40"),
    ],
)
def test_triton_says_what_it_cannot_run(jax_triton, change, message):
    assert choose("auto", **change).name == "xla"
    with pytest.raises(InvalidConfigError, match=message):
        choose("triton", **change)


def test_a_missing_jax_triton_is_named_with_its_remedy(no_jax_triton, caplog):
    with pytest.raises(InvalidConfigError, match=r'run: pip install "jax-triton<0.4"'):
        choose("triton", compute_capability=8.0)
    assert choose("auto", compute_capability=8.0).name == "xla"
    assert 'pip install "jax-triton<0.4"' in caplog.text


def test_an_unknown_name():
    with pytest.raises(InvalidConfigError, match="choose one of auto, mosaic, triton, xla"):
        choose("magic")
