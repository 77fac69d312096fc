"""rjax beside engines that stand in for vLLM and SGLang: the same requests, and what fails."""

import ast
import json
import sys
from pathlib import Path

import pytest

from bench.command_line import run
from bench.compare_engines import __main__ as compare_engines
from bench.compare_engines import engine_side
from bench.compare_engines.process import check_python, run_engine
from bench.compare_engines.workloads import WORKLOADS, Workload
from rjax.benchmarks.model_shapes import write_folder
from tests.bench.fake_engines import SGLANG, VLLM, python_with

SMALL = Workload(prefixes=(16, 8), requests=3, unique=(2, 5), output=(4, 4))
SAMPLES = Workload(prefixes=(0,), requests=1, unique=(8, 8), output=(2, 6), n=3)


def drawn(workload: Workload) -> dict:
    return workload.drawn(vocab_size=256, seed=0, max_num_seqs=4)


def make_task(folder: Path, engine: str, requests: dict, **options) -> dict:
    path = folder / "requests.json"
    path.write_text(json.dumps(requests))
    settings = {
        "model": str(write_folder("tiny", folder / "tiny")),
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "gpu_memory_utilization": 0.5,
        "seed": 0,
    }
    task = {"engine": engine, "requests": str(path), "repeats": 2}
    return {**task, "options": settings | options}


def calls(folder: Path, engine: str) -> list[dict]:
    """What an engine was called with."""
    lines = (folder / engine / "calls.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_side_imports_only_the_standard_library():
    tree = ast.parse(Path(engine_side.__file__).read_text())
    names = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names <= sys.stdlib_module_names


def test_requests_share_prefixes_in_turn():
    found = drawn(SMALL)
    first, second, third = found["prompts"]
    assert first[:16] == third[:16] != second[:16]
    assert {len(prompt) for prompt in found["prompts"]} <= set(range(10, 22))
    assert found["max_tokens"] == [4, 4, 4]
    assert found["measure_step"]
    assert drawn(SMALL) == found
    assert not drawn(SAMPLES)["measure_step"], "the lengths of the outputs differ"
    assert max(found["prompts"][0]) < 256


def test_scaling_keeps_what_a_workload_is_about():
    for workload in WORKLOADS.values():
        small = workload.scaled(32)
        assert small.longest <= workload.longest / 8
        assert (small.n > 1) == (workload.n > 1)
        assert (max(small.prefixes) > 0) == (max(workload.prefixes) > 0)
        assert workload.scaled(1) == workload


def test_every_engine_gets_the_same_requests(tmp_path):
    requests = {"small": drawn(SMALL), "samples": drawn(SAMPLES)}
    python = python_with(tmp_path, vllm=VLLM, sglang=SGLANG)
    seen = {}
    for engine in ("vllm", "sglang"):
        task = make_task(tmp_path, engine, requests)
        found = run_engine(check_python(python, engine), task, list(requests), tmp_path, 60)
        assert all(len(row["all_seconds"]) == 2 for row in found["workloads"].values())
        assert "step_ms" in found["workloads"]["small"]
        assert "step_ms" not in found["workloads"]["samples"]
        assert found["versions"][engine][:2] == "0."
        options, *seen[engine] = calls(tmp_path, engine)
        assert options["options"]["dtype"] == "bfloat16"
        assert {64, 4, 0.5} <= set(options["options"].values())
    assert seen["vllm"] == seen["sglang"]
    runs = [call for call in seen["vllm"] if "prompts" in call]
    small, samples = requests["small"], requests["samples"]
    # not timed, end to end, for the steps; then the other workload
    counts = [[4] * 3] * 3 + [[1] * 3] + [[4] * 3, [1] * 3] * 2 + [samples["max_tokens"]] * 3
    assert [call["max_tokens"] for call in runs] == counts
    assert [call["prompts"] for call in runs] == [small["prompts"]] * 8 + [samples["prompts"]] * 3
    assert {(*call["n"], *call["temperature"]) for call in runs} == {
        (1,) * 3 + (0.0,) * 3,
        (3, 1.0),
    }
    cleared = [i for i, call in enumerate(seen["vllm"]) if "cleared" in call]
    assert cleared == [1, 3, 11, 13], "before each run end to end, and no other"


def test_a_workload_that_fails_is_a_row_and_the_next_one_runs(tmp_path):
    python = python_with(tmp_path, vllm=VLLM)
    one = {"max_tokens": [2], "n": 1, "measure_step": False}
    first = {"good": 1, "dies": 1000, "raises": 1001, "last": 2}
    requests = {name: {**one, "prompts": [[token, 3]]} for name, token in first.items()}
    task = make_task(tmp_path, "vllm", requests)
    found = run_engine(python, task, list(requests), tmp_path, 60)
    failed = {name: row.get("failed") for name, row in found["workloads"].items()}
    assert failed == {
        "good": None,
        "dies": "it ended with status 3",
        "raises": "ValueError: no such token",
        "last": None,
    }
    assert sum("options" in call for call in calls(tmp_path, "vllm")) == 3, "a process each"


@pytest.mark.slow
def test_an_engine_that_hangs_is_ended(tmp_path, capfd):
    python = python_with(tmp_path, vllm=VLLM)
    hangs = {"max_tokens": [2], "n": 1, "measure_step": False, "prompts": [[1002]]}
    task = make_task(tmp_path, "vllm", {"hangs": hangs})
    found = run_engine(python, task, ["hangs"], tmp_path, 3)
    assert found["workloads"] == {"hangs": {"failed": "ended after 3 s"}}


def test_lack_of_memory_at_the_start_is_in_every_row(tmp_path, capfd):
    python = python_with(tmp_path, vllm=VLLM)
    task = make_task(tmp_path, "vllm", {"a": {}, "b": {}}, max_num_seqs=99)
    found = run_engine(python, task, ["a", "b"], tmp_path, 60)
    said = "out of memory: torch.OutOfMemoryError: CUDA out of memory. Tried 9 GiB"
    assert found["workloads"] == {"a": {"failed": said}, "b": {"failed": said}}
    assert "Engine core initialization failed" in capfd.readouterr().err, "the end of its log"


def test_outputs_of_another_length_are_no_result():
    class Short:
        def generate(self, prompts, max_tokens, n):
            return [count - 1 for count in max_tokens], 0

    workload = {"prompts": [[1]], "max_tokens": [4], "n": 1, "measure_step": False}
    with pytest.raises(RuntimeError, match="3 tokens in 1 outputs; the requests are for 4 in 1"):
        engine_side.measure(Short(), workload, 1)


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/nowhere/python", "--python /nowhere/python: there is no such program"),
        ("/bin/echo", "--python /bin/echo: this is not a Python interpreter"),
        (sys.executable, "it cannot import sglang: ModuleNotFoundError: No module named 'sglang'"),
    ],
)
def test_a_wrong_python_is_one_line_before_anything_runs(python, said, capsys):
    with pytest.raises(SystemExit) as end:
        run(
            "bench.compare_engines",
            lambda: compare_engines.main(["--engine=sglang", f"--python={python}"]),
        )
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("bench.compare_engines: error: ")
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--shapes=tiny", "--workloads=long-prefix"], "long-prefix has 8384 tokens a sequence"),
        (["--model=/nowhere"], "--model /nowhere: no config.json of a language model"),
    ],
)
def test_a_model_that_cannot_run_the_workloads(tmp_path, given, said):
    python = python_with(tmp_path, vllm=VLLM)
    with pytest.raises(ValueError, match=said):
        compare_engines.main(["--engine=vllm", f"--python={python}", *given])


@pytest.mark.slow
def test_rjax_beside_another_engine(tmp_path, capsys, monkeypatch):
    python = python_with(tmp_path, vllm=VLLM)
    path = tmp_path / "kept.json"
    given = [
        *("--engine=vllm", f"--python={python}", "--shapes=tiny", "--scale=32", "--repeats=1"),
        "--weights=checkpoint",
        *("--workloads=shared,samples", "--max-num-seqs=2", f"--out={path}"),
    ]
    monkeypatch.setattr("sys.argv", ["compare_engines", *given])
    compare_engines.main()
    kept = json.loads(path.read_text())
    assert kept["command"].startswith("python -m bench.compare_engines --engine=vllm --shapes=tiny")
    assert str(tmp_path) not in path.read_text()
    assert kept["environment"]["versions"]["vllm"] == "0.33.0"
    assert kept["copy_bytes_per_s"] > 0
    rows = kept["rows"]
    assert [(row["workload"], row["engine"]) for row in rows] == [
        ("shared", "rjax"),
        ("shared", "vllm"),
        ("samples", "rjax"),
        ("samples", "vllm"),
    ]
    assert not [row for row in rows if "failed" in row]
    assert all(row["output_per_s"] > 0 and row["ratio"] > 0 for row in rows[::2])
    assert rows[0]["cached_percent"] > 0, "the second request finds the prefix"
    table = capsys.readouterr().out
    assert "output tokens/s" in table
    assert "ratio" in table
    (options, *_) = calls(tmp_path, "vllm")
    assert options["options"]["load_format"] == "auto", "the checkpoint"
    assert options["options"]["max_model_len"] == kept["settings"]["max_model_len"] == 128
