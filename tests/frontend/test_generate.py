"""The command: what it prints, and one line and status 2 for every kind of bad input."""

import io
import json
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from rjax.api.llm import LLM
from rjax.cli import errors
from rjax.commands import generate
from rjax.errors import OutOfMemoryError
from rjax.models import CheckpointError

from .fake_engine import FakeEngine
from .tiny_tokenizers import build

QUESTIONS = [("How old is Ann?", "Ann is 41."), ("Where is Bo?", "Bo is in Peru.")]


@pytest.fixture(autouse=True)
def demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo of two questions in place of the bundled one."""
    module = types.ModuleType("rjax.models.tables.demo")
    module.demo_system_prompt = lambda: "| name | age |\n" + "| Ann | 41 |\n" * 20  # type: ignore[attr-defined]
    module.demo_questions = lambda: QUESTIONS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rjax.models.tables.demo", module)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine behind the command; answers the first demo question rightly, the second not."""

    def answer(prompt: str) -> str:
        return "Ann is 41." if "Ann" in prompt.split("user\n")[-1] else "I do not know."

    made = FakeEngine(build("byte_level"), answer=answer)
    made.options = {}  # type: ignore[attr-defined]

    def load(options: dict[str, Any], *, progress: bool) -> LLM:
        made.options = {**options, "progress": progress}  # type: ignore[attr-defined]
        return LLM.from_engine(made)

    monkeypatch.setattr(generate, "_load", load)
    return made


type Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command: (exit status, stdout, stderr)."""

    def call(*argv: str) -> tuple[int, str, str]:
        status = generate.main(argv)
        out, err = capsys.readouterr()
        return status, out, err

    return call


def prompts_seen(engine: FakeEngine) -> list[str]:
    return [prompt or "" for _, _, prompt, _ in engine.seen]


def test_demo(run: Run, engine: FakeEngine) -> None:
    status, out, err = run()
    assert status == 0
    assert "Processed prompts" not in err  # no terminal
    lines = out.splitlines()
    assert lines[:2] == ["Q: How old is Ann?", "A: Ann is 41."]
    assert lines[3:5] == ["Q: Where is Bo?", "A: I do not know.   (expected: Bo is in Peru.)"]
    assert lines[6] == "answers: 1 of 2 as expected"
    tokens = sum(len(row) for row, *_ in engine.seen)
    shared = 2 * len(engine.prefix)
    assert lines[7] == f"prompt tokens: {tokens}, of which {shared} shared and read once"
    assert [line.split(":")[0] for line in lines[8:]] == [
        "speed",
        "time to first token",
        "time per output token",
        "KV memory",
        "compilation",
        f"started in {lines[-1].split()[2]} s",
    ]
    assert lines[-3] == "KV memory: 1.00 MiB; without sharing it would be 3.00 MiB"
    assert lines[-2] == "compilation: 0.0 s waited for, not in the speeds and times above"
    assert re.fullmatch(
        r"started in \S+ s: imports \S+, weights 0\.2, pool 1\.5; up to 2 sequences at once",
        lines[-1],
    )
    assert all("| name | age |" in prompt for prompt in prompts_seen(engine))
    assert all(params.greedy for _, params, *_ in engine.seen)


def test_json_is_the_whole_of_stdout(run: Run, engine: FakeEngine) -> None:
    status, out, err = run("--json", "--no-progress")
    assert (status, err) == (0, "")
    found = json.loads(out)
    first, second = found["results"]
    assert (first["prompt"], first["outputs"][0]["text"]) == ("How old is Ann?", "Ann is 41.")
    assert (first["as_expected"], second["as_expected"]) == (True, False)
    assert first["outputs"][0]["finish_reason"] == "length"
    assert found["stats"]["prompt_tokens"] == sum(r["prompt_tokens"] for r in found["results"])
    assert found["stats"]["kv_bytes_without_sharing"] == 3 * 2**20
    phases = found["stats"]["startup_phases"]
    assert (phases["weights"], phases["pool"]) == (0.25, 1.5)
    assert found["stats"]["startup_seconds"] == pytest.approx(sum(phases.values()))
    assert found["stats"]["compile_wait_seconds"] == 0
    assert engine.options["max_num_seqs"] == 16  # type: ignore[attr-defined]


def test_every_sampling_flag_reaches_the_request(run: Run, engine: FakeEngine) -> None:
    argv = [
        "--prompt",
        "hi",
        "-n",
        "2",
        "--temperature",
        "0.7",
        "--top-p",
        "0.9",
        "--top-k",
        "5",
        "--min-p",
        "0.1",
        "--seed",
        "3",
        "--presence-penalty",
        "-1",
        "--frequency-penalty",
        "0.5",
        "--repetition-penalty",
        "1.1",
        "--max-tokens",
        "7",
        "--min-tokens",
        "0",
        "--stop",
        "END",
        "--stop",
        "STOP",
        "--stop-token-id",
        "9",
        "--ignore-eos",
        "--include-stop-str-in-output",
        "--no-skip-special-tokens",
        "--logit-bias",
        "4=-2.5",
        "--no-spaces-between-special-tokens",
        "--allowed-token-id",
        "11",
        "--allowed-token-id",
        "12",
        "--no-progress",
    ]
    status, out, _ = run(*argv)
    assert status == 0
    assert "A0: " in out
    assert "A1: " in out
    params = engine.seen[0][1]
    assert (params.n, params.temperature, params.top_p, params.top_k) == (2, 0.7, 0.9, 5)
    assert (params.min_p, params.seed, params.presence_penalty) == (0.1, 3, -1.0)
    assert (params.frequency_penalty, params.repetition_penalty) == (0.5, 1.1)
    assert (params.max_tokens, params.stop, params.stop_ids) == (7, ("END", "STOP"), (9,))
    assert params.ignore_eos
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens
    assert not params.spaces_between_special_tokens
    assert params.logit_bias == {4: -2.5}
    assert list(params.allowed_token_ids or ()) == [11, 12]


def test_engine_flags_reach_the_engine(run: Run, engine: FakeEngine) -> None:
    argv = [
        "--model",
        "m",
        "--tokenizer",
        "t",
        "--revision",
        "r",
        "--dtype",
        "float32",
        "--load-format",
        "dummy",
        "--max-model-len",
        "99",
        "--relay",
        "off",
        "--backend",
        "xla",
        "--max-num-seqs",
        "4",
        "--num-pages",
        "5",
        "--page-size",
        "16",
        "--kv-cache-dtype",
        "fp8",
        "--gpu-memory-utilization",
        "0.5",
        "--max-logprobs",
        "7",
        "--tensor-parallel-size",
        "2",
        "--max-num-batched-tokens",
        "64",
        "--seed",
        "8",
        "--prompt",
        "hi",
        "--no-progress",
    ]
    assert run(*argv)[0] == 0
    assert engine.options == {  # type: ignore[attr-defined]
        "model": "m",
        "warmup": "auto",
        "tokenizer": "t",
        "revision": "r",
        "dtype": "float32",
        "load_format": "dummy",
        "max_model_len": 99,
        "enable_relay_attention": "off",
        "backend": "xla",
        "max_num_seqs": 4,
        "num_pages": 5,
        "page_size": 16,
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.5,
        "max_logprobs": 7,
        "tensor_parallel_size": 2,
        "max_num_batched_tokens": 64,
        "seed": 8,
        "progress": False,
    }
    assert "| name |" not in prompts_seen(engine)[0]


def test_system_prompt_and_raw(run: Run, engine: FakeEngine, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("From a file.\n", encoding="utf-8")
    for argv, expected in (
        (["--system-prompt", "Be kind."], "<|im_start|>system\nBe kind.<|im_end|>"),
        (["--system-prompt-file", str(file)], "<|im_start|>system\nFrom a file.\n<|im_end|>"),
        (["--raw"], "ask"),
        (["--raw", "--system-prompt", "Be kind. "], "Be kind. ask"),
        (["--system-prompt", ""], "<|im_start|>user\nask"),
    ):
        engine.seen.clear()
        assert run("--prompt", "ask", "--no-progress", *argv)[0] == 0
        assert prompts_seen(engine)[0].startswith(expected)
        assert ("<|im_start|>" in prompts_seen(engine)[0]) == ("--raw" not in argv)


def test_prompts_from_stdin_and_files(
    run: Run, engine: FakeEngine, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from\nstdin\n"))
    lines, records = tmp_path / "ask.txt", tmp_path / "ask.jsonl"
    lines.write_text("one\n\n two \n", encoding="utf-8")
    records.write_text(
        '{"prompt": "three", "max_tokens": 5, "stop": "x"}\n'
        '{"messages": [{"role": "system", "content": "own"}, '
        '{"role": "user", "content": "four"}]}\n',
        encoding="utf-8",
    )
    status, out, _ = run("--prompt", "-", "--prompts-file", str(lines), "--raw", "--no-progress")
    assert status == 0
    assert prompts_seen(engine) == ["from\nstdin", "one", " two "]
    engine.seen.clear()
    assert run("--prompts-file", str(records), "--max-tokens", "9", "--no-progress")[0] == 0
    assert [p.max_tokens for _, p, *_ in engine.seen] == [5, 9]
    assert [p.stop for _, p, *_ in engine.seen] == [("x",), ()]
    assert "| name | age |" in prompts_seen(engine)[0]
    assert prompts_seen(engine)[1].startswith("<|im_start|>system\nown<|im_end|>")


BAD_ARGUMENTS = [
    (["--temprature", "1"], "--temperature"),
    (["--max-tokens", "many"], "many"),
    (["--relay", "maybe"], "maybe"),
    (["--logit-bias", "5"], "ID=VALUE"),
    (["--logit-bias", "5=1", "--logit-bias", "5=2"], "twice"),
    (["--system-prompt", "a", "--system-prompt-file", "b"], "not allowed"),
    (["stray"], "stray"),
    (["--prompt", ""], "empty"),
    (["--prompt", "-", "--prompt", "-"], "twice"),
    (["--system-prompt", "a"], "nothing to generate"),
    (["--raw"], "nothing to generate"),
    (["--system-prompt-file", "/nowhere/a"], "No such file"),
    (["--prompts-file", "/nowhere/a"], "No such file"),
    (["--prompts-file", "/"], "directory"),
    (["--prompts-file", "a\0b"], "null"),
    (["--chat-template", "/nowhere/a", "--prompt", "a"], "No such file"),
    *(
        ([f"--{name}={value}"], name.replace("-", "_"))
        for name, values in {
            "temperature": ("nan", "inf", "-1", "3"),
            "top-p": ("nan", "0", "-1", "2147483648"),
            "top-k": ("-2", "2147483648"),
            "min-p": ("nan", "-1", "2"),
            "presence-penalty": ("nan", "-inf", "3"),
            "frequency-penalty": ("nan", "3"),
            "repetition-penalty": ("nan", "0", "-1", "inf"),
            "max-tokens": ("0", "-1", "2147483648"),
            "min-tokens": ("-1", "2147483648"),
            "logprobs": ("-2", "2147483648"),
            "prompt-logprobs": ("-2",),
            "seed": ("-1", "9223372036854775808"),
            "stop": ("",),
        }.items()
        for value in values
    ),
    (["--kv-cache-dtype", "int8"], "choose from"),
    (["-n", "0"], "n is 0"),
    (["-n", "2147483648"], "n is"),
    (["--stop-token-id", "-1"], "stop_token_ids"),
    (["--allowed-token-id", "2147483648"], "allowed_token_ids"),
    (["--logit-bias", "1=nan"], "logit_bias"),
    (["--no-detokenize", "--stop", "a"], "detokenize"),
]


@pytest.mark.parametrize(("argv", "message"), BAD_ARGUMENTS)
def test_bad_arguments_end_in_one_line(argv: list[str], message: str, run: Run) -> None:
    # No engine: the model must not be loaded before the input is known to be good.
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("rjax generate: error: ")
    assert message in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--page-size", "7"], "page_size"),
        (["--num-pages", "0"], "num_pages"),
        (["--num-pages", "2147483648"], "num_pages"),
        (["--max-num-seqs", "-1"], "max_num_seqs"),
        (["--max-model-len", "0"], "max_model_len"),
        (["--gpu-memory-utilization", "nan"], "gpu_memory_utilization"),
        (["--gpu-memory-utilization", "0"], "gpu_memory_utilization"),
        (["--tensor-parallel-size", "0"], "tensor_parallel_size"),
        (["--model", "/nowhere/model"], "/nowhere/model"),
    ],
)
def test_bad_engine_options_end_in_one_line(argv: list[str], message: str, run: Run) -> None:
    status, out, err = run("--prompt", "a", "--no-progress", *argv)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "bad JSON"),
        ("[1]", "object"),
        ("[" * 100_000, "bad JSON"),
        ('{"prompt": ""}', "empty"),
        ('{"prompt": 5}', "text"),
        ("{}", "either"),
        ('{"prompt": "a", "messages": []}', "either"),
        ('{"messages": []}', "empty"),
        ('{"messages": [{"role": "user"}]}', "content"),
        ('{"prompt": "a", "temprature": 1}', "temperature"),
        ('{"prompt": "a", "temperature": NaN}', "temperature"),
        ('{"prompt": "a", "max_tokens": "5"}', "max_tokens"),
        ('{"prompt": "a", "n": 0}', "n is 0"),
    ],
)
def test_bad_line_is_named(
    line: str, message: str, run: Run, engine: FakeEngine, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "ask.jsonl"
    file.write_text('{"prompt": "good"}\n' + line + "\n", encoding="utf-8")
    status, out, err = run("--prompts-file", str(file), "--no-progress")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert f"{file}:2: " in err
    assert message in err


def test_files_that_hold_no_prompts(run: Run, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "ask.txt"
    for content, message in ((b"", "no prompt"), (b"\n \n", "no prompt"), (b"\xff\xfe", "UTF-8")):
        file.write_bytes(content)
        status, _, err = run("--prompts-file", str(file))
        assert status == 2
        assert err.count("\n") == 1
        assert message in err


def test_one_bad_prompt_harms_no_other(run: Run, engine: FakeEngine) -> None:
    argv = ["--prompt", "first Ann", "--prompt", "x" * 9000, "--prompt", "last Ann"]
    status, out, err = run(*argv, "--no-progress")
    assert status == 2
    assert out.count("A: Ann is 41.") == 2
    assert "E: " in out
    assert err.count("\n") == 1
    assert "--prompt 2: " in err
    assert "prompts[" not in out + err
    status, out, _ = run(*argv, "--no-progress", "--json")
    results = json.loads(out)["results"]
    assert ["error" in result for result in results] == [False, True, False]


@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OutOfMemoryError("the pool\nis too small"), 2, "the pool is too small"),
        (CheckpointError("shard 2 is truncated"), 2, "shard 2 is truncated"),
    ],
)
def test_ends_of_the_command(
    failure: BaseException, status: int, message: str, run: Run, engine: FakeEngine
) -> None:
    engine.fail_at_step, engine.failure = 1, failure
    found, out, err = run("--prompt", "a", "--no-progress")
    assert (found, out, err.count("\n")) == (status, "", 1)
    assert message in err
    assert not engine.live


def test_defects_keep_their_traceback(engine: FakeEngine) -> None:
    engine.fail_at_step, engine.failure = 1, ValueError("a defect")
    with pytest.raises(ValueError, match="a defect"):
        generate.main(["--prompt", "a", "--no-progress"])


def test_broken_pipe_is_quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def broken() -> int:
        raise BrokenPipeError

    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert errors.run_command("x", broken) == 141


def test_warnings_are_one_line(run: Run, engine: FakeEngine, recwarn: Any) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        status, _, err = run("--prompt", "a", "--temperature", "0.001", "--no-progress")
    assert status == 0
    assert all(line.startswith("rjax generate: warning: ") for line in err.splitlines())
    assert "temperature" in err


def test_help_teaches(run: Run) -> None:
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    for needed in ("examples:", "--relay", "--kv-cache-dtype", "exit status", "--temperature"):
        assert needed in out
