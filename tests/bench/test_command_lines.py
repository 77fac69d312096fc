"""Errors on a benchmark's command line are reported in one line, before the measurement."""

import re

import pytest

from bench import (
    attention,
    quantised_answers,
    scheduler,
    serve_replicas,
    server_share,
    swap,
    table_answers,
    throughput,
)
from bench.command_line import run
from bench.compare_engines import __main__ as compare_engines
from bench.compare_torch import __main__ as compare_torch
from bench.decode_step import __main__ as decode_step
from bench.kernels import cost_model
from bench.load_weights import __main__ as load_weights
from bench.longbench import __main__ as longbench
from bench.machine_code import __main__ as machine_code
from bench.startup import __main__ as startup
from rjax.cli.values import some_of, whole, wholes

WRONG = [
    (attention, "--batch=0", "'0': give a whole number from 1 on"),
    (attention, "--heads=4", "'4': give 2 numbers, commas between"),
    (attention, "--page-size=3", "invalid choice: 3 (choose from 8, 16, 32, 64, 128, 256)"),
    (compare_engines, "--engine=vllm", "the following arguments are required: --python"),
    (compare_engines, "--engine=trt --python=x", "invalid choice: 'trt'"),
    (compare_engines, "--engine=vllm --python=x --workloads=many", "'many': choose from shared,"),
    (compare_engines, "--engine=vllm --python=x --model=x --weights=dummy", "for --shapes"),
    (
        compare_engines,
        "--engine=vllm --python=x --gpu-memory-utilization=90",
        "'90': give a share above 0 and up to 1",
    ),
    (compare_torch, "--shapes=tiny --methods=hands", "'hands': choose from hand, flex"),
    (compare_torch, "--shapes=tiny --prefix=0,-1", "'-1': give a whole number from 0 on"),
    (decode_step, "--batch=x", "'x': give a whole number from 1 on"),
    (decode_step, "--page-size=7", "invalid choice: 7"),
    (longbench, "--relay=on,maybe", "'on,maybe': choose from auto, on, off"),
    (machine_code, "--batch=1,", "'': give a whole number from 1 on"),
    (quantised_answers, "--schemes=fp8,nf4", "'fp8,nf4': choose from fp8, int8, int4, awq"),
    (serve_replicas, "--replicas 0", "'0': give a whole number from 1 on"),
    (server_share, "--streams 64 0", "'0': give a whole number from 1 on"),
    (server_share, "--works chat", "invalid choice: 'chat'"),
    (startup, "--prompt=64 --max-model-len=64", "--prompt is 64; --max-model-len must be more"),
    (startup, "--warmup=of", "'of': choose from off, background, on"),
    (startup, "--what=chat", "'chat': choose from engine, generate, serve"),
    (load_weights, "--file-mb=0", "'0': give a whole number from 1 on"),
    (swap, "--pages=4,0", "'0': give a whole number from 1 on"),
    (throughput, "--requests=0", "'0': give a whole number from 1 on"),
    (throughput, "--max-num-sequences=4", "did you mean --max-num-seqs?"),
    (cost_model, "--heads=8,2", "'8,2': give 3 numbers"),
]


@pytest.mark.parametrize(("command", "given", "said"), WRONG)
def test_wrong_options(command, given, said, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(given.split())
    assert end.value.code == 2
    _, errors = capsys.readouterr()
    assert re.fullmatch(rf"bench\.\S+: error: .*{re.escape(said)}.*\n", errors), errors


@pytest.mark.parametrize(
    ("command", "given", "said"),
    [
        (scheduler, "--steps=0", "'0': give a whole number from 1 on"),
        (table_answers, "--rows 9 4", "--rows 9 4: give the fewest first"),
    ],
)
def test_wrong_options_of_the_process(command, given, said, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", *given.split()])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_an_engine_that_refuses_is_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        run(
            "bench.throughput",
            lambda: throughput.main(["--shapes=tiny", "--page-size=7", "--quiet"]),
        )
    assert end.value.code == 2
    _, errors = capsys.readouterr()
    assert errors == (
        "bench.throughput: error: page_size is 7; choose one of 8, 16, 32, 64, 128, 256 tokens\n"
    )


def test_without_torch_it_says_where_to_put_it(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match=r"has no torch or no transformers; .* --torch-python"):
        compare_torch.main(["--shapes=tiny", f"--torch-python={python}"])


def test_numbers_and_names():
    assert whole(0)("0") == 0
    assert wholes(1)("3,1") == [3, 1]
    assert wholes(1, 2)("3,1") == [3, 1]
    assert some_of("auto", "off")("off") == ["off"]
