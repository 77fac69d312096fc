"""``rjax quantize``: the folder, the summary and the errors."""

import json

import pytest

from rjax import LLM, SamplingParams
from rjax import __main__ as command
from rjax.commands import quantize
from rjax.models import BUNDLED_MODEL, config_from_folder, init_model, load_model, save_model
from rjax.models.loading.config import config_from_dict
from rjax.models.quantising import GROUP_SIZES, SCHEMES
from rjax.models.tables.demo import demo_questions, demo_system_prompt
from tests.bundled import BUNDLED_SIZES
from tests.serve.live_server import TOKENIZER


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model folder with a tokenizer, a chat template and random weights."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    config = config_from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 2048,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
    )
    save_model(init_model(config, seed=1), config, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TOKENIZER / name).read_bytes())
    return folder


def test_the_flags_are_those_of_the_library():
    assert quantize._SCHEMES == SCHEMES
    assert sorted(quantize._GROUP_SIZES) == sorted(GROUP_SIZES)


@pytest.mark.slow  # the other tests take a tiny model the same way
@pytest.mark.usefixtures("optimised", "kept")
@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_the_bundled_model_answers_quantised(scheme, tmp_path, capsys):
    out = tmp_path / scheme
    assert command.run(["quantize", str(BUNDLED_MODEL), str(out), "--scheme", scheme]) == 0
    shown, err = capsys.readouterr()
    assert f"wrote {out}" in shown and "of 70 projections" in shown
    assert "Quantising layers" in err
    assert config_from_folder(out).quant_method == "compressed-tensors"
    llm = LLM(str(out), **BUNDLED_SIZES, use_tqdm=False)
    question, answer = demo_questions()[0]
    chat = [
        {"role": "system", "content": demo_system_prompt()},
        {"role": "user", "content": question},
    ]
    (output,) = llm.chat(chat, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    assert output.outputs[0].text.strip() == answer
    llm.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("jsonl", [True, False])
def test_awq_on_prompts_of_a_file(jsonl, tiny, tmp_path, capsys):
    prompts = tmp_path / "prompts"
    chat = [{"role": "user", "content": "What is in the table?"}]
    records = [{"prompt": "one two three"}, {"messages": chat}, {"prompt": "not used"}]
    lines = map(json.dumps, records) if jsonl else ("one two three", "four five", "not used")
    prompts.write_text("\n".join(lines))
    argv = ["quantize", str(tiny), str(tmp_path / "out"), "--scheme", "awq", "--json"]
    argv += ["--prompts", str(prompts), "--num-calibration-samples", "2", "--max-seq-length", "8"]
    assert command.run([*argv, "--symmetric", "--no-progress"]) == 0
    shown, err = capsys.readouterr()
    assert err == ""
    found = json.loads(shown)
    assert (found["scheme"], found["group_size"], found["symmetric"]) == ("awq", 32, True)
    assert found["prompts"] == 2
    assert 2 <= found["prompt_tokens"] <= 16
    assert found["bytes_after"] < found["bytes_before"]
    assert len(found["modules"]) == 2 * 7
    assert all(0 < one["relative_error"] < 1 for one in found["modules"])
    load_model(tmp_path / "out", dtype=None, progress=False)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--scheme", "awq"], "--scheme awq needs --prompts FILE"),
        (["--scheme", "awq", "--prompts", "/nowhere"], "--prompts /nowhere: No such file"),
        (["--scheme", "fp8", "--group-size", "64"], "fp8 has no groups"),
        (
            ["--scheme", "mxfp4"],
            "only the experts of a model, but LlamaForCausalLM has none; choose",
        ),
        (["--scheme", "mxfp4", "--group-size", "32"], "mxfp4 has no groups to choose"),
        (["--scheme", "int4", "--symmetric"], "int4 is always symmetric"),
        (["--scheme", "int4", "--group-size", "128"], "groups of 128 do not divide"),
        (["--scheme", "int4", "--group-size", "100"], "invalid choice: 100"),
        (["--scheme", "nf4"], "invalid choice: 'nf4'"),
        (["--scheme", "awq", "--max-seq-length", "0"], "'0' is no whole number"),
        ([], "required: --scheme"),
    ],
)
def test_wrong_input_is_one_line(argv, said, tiny, tmp_path, capsys):
    assert command.run(["quantize", str(tiny), str(tmp_path / "out"), *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "prompts.jsonl: holds no prompt"),
        ("\n \n", "prompts.jsonl: holds no prompt"),
        ('{"prompt": "a"}\n{"prompt": 3}', "prompts.jsonl:2: prompt must be a text"),
        ('{"messages": [{"role": "user"}]}', "prompts.jsonl:1: messages[0] has a content of type"),
    ],
)
def test_prompts_that_cannot_be_used(content, said, tiny, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(content)
    argv = ["quantize", str(tiny), str(tmp_path / "out"), "--scheme", "awq"]
    assert command.run([*argv, "--prompts", str(prompts)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_folders_that_cannot_be_used(tiny, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    out = str(tmp_path / "out")
    run = ["quantize", str(tiny), out, "--scheme", "int8", "--no-progress", "--prompts", "unread"]
    assert command.run(run) == 0
    assert "--prompts has no effect" in capsys.readouterr().err
    for source, target, said in (
        (str(tiny), str(tmp_path / "full"), "is not empty"),
        (str(tiny), str(tiny / "config.json"), "is a file"),
        (str(tiny), str(tiny / "config.json" / "new"), "new cannot be written: Not a directory"),
        (str(tiny), "/proc/new", "/proc/new cannot be written: "),
        (str(tiny), str(tmp_path / ("x" * 300)), "cannot be written: File name too long"),
        (str(tmp_path / "full"), str(tmp_path / "again"), "has no config.json"),
        (out, str(tmp_path / "again"), "quantised already"),
        ("/nowhere", str(tmp_path / "again"), "does not exist"),
    ):
        assert command.run(["quantize", source, target, "--scheme", "fp8"]) == 2
        shown, err = capsys.readouterr()
        assert (shown, err.count("\n")) == ("", 1)
        assert said in err
    assert not (tmp_path / "again").exists()
