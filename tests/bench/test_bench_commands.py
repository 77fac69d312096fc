"""Every benchmark runs at a small size on a CPU, keeps a record, and draws it."""

import functools
import json
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import (
    RESULTS,
    attention,
    quantised_answers,
    report,
    suite,
    throughput,
)
from bench.ceilings import Ceilings, measure_ceilings
from bench.compare_torch import __main__ as compare_torch
from bench.decode_step import __main__ as decode_step
from bench.decode_step.roofline import DecodeCase, roofline_seconds, stages
from bench.decode_step.rows import EXPERTS, GROWTH, TABLE, Row, tensor_parallel
from bench.load_weights import __main__ as load_weights
from bench.longbench import __main__ as longbench
from bench.random_checkpoint import write_checkpoint
from bench.startup import __main__ as startup
from rjax import LLM
from rjax.benchmarks.model_shapes import SHAPES
from rjax.benchmarks.points import in_time
from rjax.benchmarks.records import load
from rjax.benchmarks.text_tables import markdown, text
from rjax.benchmarks.workload import from_file, synthetic
from rjax.commands.bench import latency
from rjax.errors import InvalidConfigError
from rjax.models import config_from_dict, load_model
from tests.bundled import BUNDLED_SIZES
from tests.docs.shell_commands import check_arguments
from tests.serve.live_server import write_model

BFLOAT16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def _ceilings():
    """Measured once and not for each command: it takes seconds."""
    once = functools.cache(measure_ceilings)
    with pytest.MonkeyPatch.context() as patch:
        for command in (attention, decode_step, throughput):
            patch.setattr(command, "measure_ceilings", once)
        yield


def test_the_roofline_of_a_step_reads_weights_and_kv_once():
    config = config_from_dict(SHAPES["llama-3-8b"])
    found = stages(config, DecodeCase(64, 2048, 256), BFLOAT16)
    weights = 2 * (32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256)
    kv = 2 * 32 * 2 * 8 * 128 * (2048 + 64 * 256)
    assert weights + kv < sum(s.moved for s in found) < 1.02 * (weights + kv)
    ceilings = Ceilings(4.3e12, 790e12)
    roofline = roofline_seconds(config, DecodeCase(64, 2048, 256), BFLOAT16, ceilings)
    assert roofline == pytest.approx(4.1e-3, rel=0.02)
    # With many rows the GEMMs are compute-bound, so the roofline exceeds the time for the bytes.
    many = DecodeCase(256, 8192, 256)
    assert roofline_seconds(config, many, BFLOAT16, ceilings) == pytest.approx(8.1e-3, rel=0.05)


_SEVERAL = tuple(row for devices in (2, 3, 4, 8) for row in tensor_parallel(devices))


@pytest.mark.parametrize("row", [*TABLE, *EXPERTS, *GROWTH, *_SEVERAL], ids=str)
def test_every_row_of_the_tables_is_a_model(row):
    changed = {} if row.layers is None else {"num_hidden_layers": row.layers}
    config = config_from_dict(SHAPES[row.model] | changed)
    assert row.layers in (None, config.num_layers)
    for quantization in (None, "fp8", "mxfp4"):
        target = row.target(quantization)
        assert target is None or target > 0
    assert row.target_ratio is None or row.target_ratio > 1


@pytest.mark.thorough
def test_decode_step(tmp_path, capsys):
    path = tmp_path / "step.json"
    given = ["--model=tiny", "--batch=3", "--shared=130", "--own=7", "--quiet", f"--json={path}"]
    with pytest.raises(SystemExit, match=r"--max-model-len is 136; these rows have up to 137"):
        decode_step.main([*given, "--max-model-len=136"])
    decode_step.main([*given, "--max-model-len=900"])
    (row,) = load(path)["rows"]
    assert row["step_ms"] > 0
    assert row["kernels"] > 0
    assert row["ratio"] == pytest.approx(row["step_ms"] / row["floor_ms"])
    assert "step / roofline" in capsys.readouterr().out
    decode_step.draw(load(path), tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_row_of_decode_steps_is_saved_as_it_ends(tmp_path, monkeypatch):
    path, measure = tmp_path / "step.json", decode_step.Bench.measure

    def cut(bench, row, *rest):
        if row.case.batch == 3:
            raise RuntimeError("cut")
        return measure(bench, row, *rest)

    monkeypatch.setattr(decode_step.Bench, "measure", cut)
    cases = (DecodeCase(2, 0, 8), DecodeCase(3, 0, 8))
    monkeypatch.setattr(decode_step, "TABLE", tuple(Row("tiny", case) for case in cases))
    with pytest.raises(RuntimeError, match="cut"):
        decode_step.main(["--quiet", f"--json={path}"])
    assert [row["batch"] for row in load(path)["rows"]] == [2]


@pytest.mark.slow
def test_an_unknown_kernel_cannot_be_left_out():
    with pytest.raises(SystemExit, match="no kernel is named 'none'; there are"):
        decode_step.main(["--quiet", "--model=tiny", "--without=none"])


@pytest.mark.slow
def test_attention(tmp_path):
    path, png = tmp_path / "attention.json", tmp_path / "attention.png"
    attention.main(
        [
            "--batch=3",
            "--prefix=128",
            "--own=20",
            "--heads=2,1",
            "--head-dim=8",
            "--quiet",
            f"--json={path}",
            f"--png={png}",
        ]
    )
    (row,) = load(path)["rows"]
    assert row["error"] < 1e-5
    assert row["plain_mib"] / row["relay_mib"] == pytest.approx(3 * 148 / (128 + 60))
    assert png.exists()


# Few shapes of steps: each is compiled.
SIZES = ["--max-num-seqs=2", "--max-num-batched-tokens=8", "--input=9", "--output=5"]
SMALL = ["--shapes=tiny", *SIZES, "--quiet"]


def test_throughput(tmp_path):
    path, png = tmp_path / "throughput.json", tmp_path / "throughput.png"
    throughput.main(
        [*SMALL, "--requests=6", "--prefix=64", "--relay=on", f"--json={path}", f"--png={png}"]
    )
    (row,) = load(path)["rows"]
    assert row["relay"] == "on"
    assert row["output_per_s"] == pytest.approx(30 / row["seconds"])
    assert row["cached_tokens"] >= 64
    # Six outputs of five tokens, of which the last are not computed; all attend to 64 + 9 and more.
    assert row["computed_tokens"] == 6 * (64 + 9 + 4) - row["cached_tokens"]
    assert row["bare_share"] == pytest.approx(row["output_per_s"] * row["bare_ms"] / 1e3 / 2)
    assert row["tflop_per_s"] > 0
    assert png.exists()


def test_throughput_refuses_a_length_that_its_requests_exceed():
    with pytest.raises(InvalidConfigError, match=r"--max-model-len is 40; each has \d+ tokens"):
        throughput.main([*SMALL, "--prefix=64", "--max-model-len=40"])


@pytest.mark.slow
def test_latency(tmp_path):
    path, png = tmp_path / "latency.json", tmp_path / "latency.png"
    given = ["--batch=2", "--prefix=0,64", "--rounds=1", f"--json={path}", f"--png={png}"]
    assert latency.main([*SMALL, *given]) == 0
    rows = load(path)["rows"]
    assert len(rows) == 2
    assert all(row["whole_ms"] >= row["first_ms"] > 0 for row in rows)
    assert png.exists()


@pytest.mark.slow
def test_startup_of_an_engine(tmp_path, capsys):
    path = tmp_path / "startup.json"
    given = ["--what=engine", "--warmup=off", "--shapes=tiny", "--prompt=5", "--max-num-seqs=2"]
    startup.main([*given, "--quiet", f"--json={path}"])
    empty, filled = load(path)["rows"]
    assert (empty["warmup"], empty["cache"], filled["cache"]) == ("off", "empty", "filled")
    assert empty["tensor_parallel_size"] == 1
    assert empty["total_s"] > empty["weights_s"] > 0
    assert empty["first_token_s"] >= empty["first_run_s"] >= 0
    assert filled["compilations"] < empty["compilations"]  # by the step
    assert startup.TITLES["engine"] in capsys.readouterr().out


# Each starts processes that compile.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["generate", "serve"])
def test_startup_of_a_command(kind, tmp_path, capsys):
    path = tmp_path / "startup.json"
    options = f"--model={write_model(tmp_path / 'model')} --load-format=dummy --num-pages=8"
    options += " --max-num-seqs=1 --max-num-batched-tokens=32 --max-model-len=64"
    if kind == "generate":
        options += " --prompt=Hi --system-prompt=Hi --max-tokens=2"
    else:
        options += " --warmup=off"
    startup.main(
        [f"--what={kind}", f"--command-options={options}", "--limit=120", f"--json={path}"]
    )
    empty, filled = load(path)["rows"]
    assert (empty["kind"], empty["cache"], filled["cache"]) == (kind, "empty", "filled")
    parts = ("imports_s", "run_s") if kind == "generate" else ("port_s", "first_answer_s")
    assert empty["total_s"] > sum(empty[part] for part in parts) > 0
    assert startup.TITLES[kind] in capsys.readouterr().out


def test_a_command_that_does_not_start_is_shown(tmp_path):
    options = ["--command-options=--page-size=7", f"--json={tmp_path / 'none.json'}"]
    with pytest.raises(SystemExit, match="page_size is 7"):
        startup.main(["--what=serve", *options])


@pytest.mark.slow
def test_load_weights(tmp_path, capsys):
    path, folder = tmp_path / "load.json", tmp_path / "checkpoint"
    given = ["--shapes=tiny", f"--folder={folder}", "--quiet", f"--json={path}"]
    load_weights.main(given)
    rows = load(path)["rows"]
    assert [(row["what"], row["page_cache"]) for row in rows] == list(load_weights._POINTS)
    assert all(row["gb_per_s"] > 0 for row in rows)
    (parameters,) = {row["gb"] for row in rows if row["what"] == "load_model"}
    assert parameters == pytest.approx(rows[0]["gb"], rel=0.1)  # the files have headers
    assert str(folder) not in load(path)["command"]
    assert "GB/s" in capsys.readouterr().out


def test_a_random_checkpoint_is_in_files_of_the_size_asked_for(tmp_path):
    files = write_checkpoint("tiny", tmp_path, file_bytes=50_000)
    assert len(files) > 2
    assert all(file.stat().st_size < 60_000 for file in files)
    loaded = load_model(tmp_path, dtype=jnp.bfloat16)
    leaf = np.abs(np.asarray(jax.tree.leaves(loaded.model)[0], np.float32))
    assert leaf.min() >= 2**-6
    assert leaf.max() < 2**-5
    before = [file.stat().st_mtime_ns for file in files]
    assert write_checkpoint("tiny", tmp_path, file_bytes=50_000) == files
    assert [file.stat().st_mtime_ns for file in files] == before


def test_points_that_time_does_not_allow_are_left_out(capsys):
    assert list(in_time([1, 2], None, desc="x", quiet=True)) == [1, 2]
    assert list(in_time([1, 2], 0.0, desc="x", quiet=True)) == []
    assert "2 of 2 points left out" in capsys.readouterr().err


def test_requests_from_a_file(tmp_path):
    share = tmp_path / "share.json"
    talk = [{"from": "human", "value": "abc"}, {"from": "gpt", "value": "defgh"}]
    share.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[:1]}]))

    def encode(text):
        return [ord(c) for c in text]

    settings = {"count": 5, "prefix": [1, 2], "longest": 10, "seed": 0}
    (request,) = from_file(share, encode, **settings)
    assert request.prompt == [1, 2, *encode("abc")]
    assert request.output_tokens == 5
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "a", "output_tokens": 3}\n{"prompt": "b"}\n')
    (request,) = from_file(lines, encode, **settings)  # the other one is too long
    assert request.output_tokens == 3
    lines.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match="entry 0"):
        from_file(lines, encode, **settings)
    with pytest.raises(ValueError, match="no request"):
        from_file(share, encode, **settings | {"longest": 4})


def test_synthetic_requests_are_the_same_each_time():
    settings = {"prefix": 5, "own": 3, "output": 2, "vocab_size": 50, "seed": 1}
    one, two = synthetic(4, **settings), synthetic(4, **settings)
    assert one == two
    assert all(r.prompt[:5] == one[0].prompt[:5] for r in one)
    assert one[0].prompt != one[1].prompt


@pytest.mark.parametrize(
    "module",
    [
        attention,
        compare_torch,
        decode_step,
        latency,
        load_weights,
        longbench,
        report,
        startup,
        suite,
        throughput,
    ],
)
def test_help_shows_a_command_that_can_be_copied(module):
    made = module.parser()
    assert made.description.count("    " + made.prog) >= 2
    assert all(action.help for action in made._actions)


def test_the_suite_runs_what_its_help_says():
    """Each benchmark of the page is run, or named with why it is not."""
    page = (Path(suite.__file__).with_name("README.md")).read_text("utf-8")
    rows = re.findall(r"\? .*?\| `(?:python -m )?((?:bench\.|rjax bench )\w+)` \|", page)
    assert len(rows) > 15
    run = {re.match(r"bench\.\w+|rjax bench \w+", line)[0] for line, _ in suite.COMMANDS.values()}
    assert set(rows) == run | set(suite.OTHERS)
    assert not run & set(suite.OTHERS)
    told = suite.parser().format_help()
    assert all(f"{name} " in told and why in told for name, why in suite.OTHERS.items())
    assert "OTHERS" not in told


@pytest.mark.parametrize("name", suite.COMMANDS)
def test_the_suite_gives_arguments_that_its_commands_take(name, monkeypatch):
    line, limit = suite.COMMANDS[name]
    words = [*shlex.split(line), "--json=x.json"]
    words += [f"--seconds={limit}"] * (name in suite._STOPS_ITSELF)
    check_arguments(words if words[0] == "rjax" else ["python", "-m", *words], monkeypatch)


def test_the_suite_repeats_the_kept_results():
    for name, (line, _) in suite.COMMANDS.items():
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        kept = re.sub(r"^python -m | --quiet| --seconds \d+", "", load(path)["command"])
        # The name that the kernel had when it was measured.
        assert line == kept.replace("mosaic.between_attention", "mosaic.post_attention_block")


@pytest.mark.thorough
def test_the_suite_ends_what_takes_too_long(tmp_path, monkeypatch, capsys):
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(suite, "COMMANDS", {"sleep": ("sleeper", 1)})
    monkeypatch.setattr("sys.argv", ["suite", f"--into={tmp_path}"])
    assert suite.main() == 1
    assert capsys.readouterr().err == "failed or out of time: sleep\n"


def test_tables_show_numbers_in_few_digits():
    rows = [{"a": 1234.5, "b": 0.123456, "c": None}, {"a": 2, "b": float("nan"), "c": True}]
    columns = {"a": "first", "b": "second", "c": "third"}
    assert markdown(rows, columns).splitlines()[2:] == [
        "| 1,234 | 0.123 |  |",
        "| 2 | not a number | yes |",
    ]
    assert text(rows, columns).splitlines()[0].split() == ["first", "second", "third"]


@pytest.mark.usefixtures("optimised", "kept")
@pytest.mark.slow
def test_quantised_answers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quantised_answers, "LLM", functools.partial(LLM, **BUNDLED_SIZES))
    path = tmp_path / "answers.json"
    quantised_answers.main(
        ["--tables=1", "--questions=1", "--rows=3", "--schemes=int8", f"--json={path}", "--quiet"]
    )
    before, after = load(path)["rows"]
    assert (before["weights"], after["weights"]) == ("bfloat16", "int8")
    assert (before["points"], before["asked"]) == (0, 1)
    assert after["tensor_mb"] < 0.6 * before["tensor_mb"]
    assert "perplexity of tables" in capsys.readouterr().out
