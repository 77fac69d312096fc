"""Group sampling is measured with a tiny model; its lengths, its counting and its floor."""

import numpy as np
import pytest

from bench.ceilings import Ceilings
from bench.rollout import __main__ as rollout
from bench.rollout.loads import Load, floor_seconds, lognormal_lengths, simulate
from rjax.benchmarks.model_shapes import SHAPES
from rjax.benchmarks.records import load
from rjax.models import config_from_dict


def test_lognormal_lengths_have_their_mean_and_most():
    lengths = lognormal_lengths(128, 64, mean=256, most=2048, sigma=0.8, seed=0)
    assert lengths.mean() == pytest.approx(256, rel=0.01)
    assert lengths.min() >= 1
    assert lengths.max() == 2048
    assert np.median(lengths) < 200


def test_counting_fills_rows_in_order():
    lengths = np.asarray([[1, 4], [2, 2]], np.int32)
    found = simulate(Load(lengths, 8, 2), 4)
    # rows hold samples (0, 1), (2, 1), (2, 1), (3, 1), (3,): four samples of nine tokens
    assert (found.steps, found.in_use) == (5, 9 / 10)
    assert found.prompts == (2 * 1 + 3 * 2 * 2 + 1 * 1) / 9
    assert found.pages == 2 * 2 + 2
    fewer = simulate(Load(lengths, 8, 2, (1,)), 4)
    assert (fewer.steps, fewer.in_use) == (5, 1.0)


def test_most_rows_are_in_use_with_a_long_queue():
    lengths = lognormal_lengths(64, 64, mean=64, most=512, sigma=0.8, seed=1)
    whole = simulate(Load(lengths, 64, 128, (32, 8)), 64)
    assert whole.in_use > 0.93
    at_once = simulate(Load(lengths[:2], 64, 128), 64)
    assert at_once.in_use < 0.3


def test_the_floor_of_groups_is_above_the_target():
    config = config_from_dict(SHAPES["llama-3-8b"])
    group = Load(np.full((8, 64), 512, np.int32), 2048, 512)
    ceilings = Ceilings(4.3e12, 790e12)
    seconds = floor_seconds(config, group, 8, ceilings)
    assert 28_000 < group.lengths.sum() / seconds < 38_000
    shorter = Load(group.lengths // 2, 2048, 512)
    assert floor_seconds(config, shorter, 8, ceilings) < 0.6 * seconds
    # 268 MB of each of 36 prompts; those of 8 take less time than the arithmetic.
    more = floor_seconds(config, group, 36, ceilings) - seconds
    read = 512 * 2048 * 2**17 / 4.3e12
    assert 28 * read > more > 20 * read
    assert floor_seconds(config, group, 37, ceilings) - seconds == pytest.approx(more + read)


def measured(path, monkeypatch, what):
    """The rows of a small run."""
    monkeypatch.setattr(rollout, "measure_ceilings", lambda: Ceilings(1e10, 1e11))
    sizes = "--prompts=2 --samples=2 --input=9 --output=4 --queue=3 --rows=3 --mean=3 --most=5"
    given = f"--shapes=tiny --page-size=8 --tail-rows=3 --quiet --what={what} --json={path}"
    rollout.main([*given.split(), *sizes.split()])
    return load(path)["rows"]


@pytest.mark.thorough
def test_refill_is_measured(tmp_path, monkeypatch, capsys):
    equal, uneven = measured(tmp_path / "rollout.json", monkeypatch, "refill")
    assert (equal["tokens"], equal["rows"], equal["in_use"]) == (18, 3, 1.0)
    assert uneven["ratio"] == pytest.approx(uneven["output_per_s"] / equal["output_per_s"])
    assert "lognormal, mean" in capsys.readouterr().out


@pytest.mark.slow
def test_groups_are_measured(tmp_path, monkeypatch):
    engine, group = measured(tmp_path / "rollout.json", monkeypatch, "groups")
    assert [row["through"] for row in (engine, group)] == ["LLM.generate", "functional.rollout"]
    assert (engine["tokens"], group["tokens"], group["rows"]) == (16, 16, 4)
    assert engine["share"] == pytest.approx(engine["output_per_s"] / engine["floor_per_s"])


def test_only_counting_needs_no_model(capsys):
    rollout.main(["--simulate", "--queue=4", "--samples=4", "--rows=8", "--mean=16", "--most=64"])
    assert "lognormal" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        rollout.main(["--simulate", "--mean=16", "--most=8"])
    assert "--most above the mean" in capsys.readouterr().err
