"""The command and LLM over the real engine, with a tiny random model."""

import json
import pathlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from rjax.api.llm import LLM
from rjax.commands import generate
from rjax.errors import ContextLengthError, InvalidRequestError
from rjax.sampling import SamplingParams

from .tiny_tokenizers import KINDS, save

pytestmark = pytest.mark.usefixtures("kept")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
SYSTEM = "Name: Ann Lee, age: 41, country: Peru. Name: Bo, age: 7, country: Chad. " * 4
OPTIONS = {"load_format": "dummy", "page_size": 8, "num_pages": 256, "max_num_batched_tokens": 32}
USERS = ["How old is Ann?", "Where is Bo?", "The quick brown fox"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model folder: tokenizer, configuration, no weights."""
    path = tmp_path_factory.mktemp("tiny")
    save(KINDS["byte_level_bos"](), path)
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def llm(folder: pathlib.Path) -> LLM:
    """One engine for all tests of this file."""
    return LLM(str(folder), sys_prompt=SYSTEM, max_num_seqs=4, use_tqdm=False, **OPTIONS)


def test_system_prompt_is_shared_and_changes_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    shared = llm.generate(USERS, params, use_tqdm=False)
    whole = [llm.get_tokenizer().encode(SYSTEM + user) for user in USERS]
    assert [o.prompt_token_ids for o in shared] == whole
    assert all(o.num_cached_tokens >= len(whole[0]) // 8 * 8 - 40 for o in shared)
    llm.fill_prefix_kv_cache(None)
    llm.reset_prefix_cache()
    alone = [llm.generate([ids], params, use_tqdm=False)[0] for ids in whole]
    assert [o.outputs for o in alone] == [o.outputs for o in shared]


def test_outputs_are_whole(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    output = llm.generate("The quick", params, use_tqdm=False)[0]
    assert output.finished
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for completion in output.outputs:
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            assert token in entry
    assert output.metrics is not None
    first, whole = output.metrics.time_to_first_token, output.metrics.e2e
    assert first is not None
    assert whole is not None
    assert 0 < first <= whole


def test_bad_prompts_harm_no_other(llm: LLM) -> None:
    bad = [{"prompt_token_ids": []}, [512], [-1], [2**31], "x" * 9000]
    greedy = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.generate(["good", *bad, "good"], greedy, use_tqdm=False)
    assert [o.error is None for o in outputs] == [True, *[False] * len(bad), True]
    for prompt in bad:
        with pytest.raises(InvalidRequestError):
            llm.generate(prompt, use_tqdm=False)
    with pytest.raises(ContextLengthError, match=r"^This model's maximum context length is 512"):
        llm.generate(bad[-1], use_tqdm=False)
    kept = outputs[len(bad)].error
    assert isinstance(kept, ContextLengthError)
    assert str(kept).startswith(f"prompts[{len(bad)}]: This model's maximum context length is 512")
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.thorough
def test_command_answers_alike_with_relay_on_and_off(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(folder), "--load-format", "dummy", "--page-size", "8", "--num-pages"]
    argv += ["256", "--system-prompt", SYSTEM, "--temperature", "0", "--max-tokens", "6"]
    argv += ["--max-num-seqs", "4", "--max-num-batched-tokens", "32"]
    argv += ["--no-progress", "--json", *(a for user in USERS for a in ("--prompt", user))]
    found = {}
    for relay in ("on", "off"):
        assert generate.main([*argv, "--relay", relay]) == 0
        found[relay] = json.loads(capsys.readouterr().out)
    on, off = (
        [result["outputs"][0]["token_ids"] for result in found[relay]["results"]]
        for relay in ("on", "off")
    )
    assert on == off
    assert found["on"]["stats"]["read_once"]
    assert not found["off"]["stats"]["read_once"]
    assert found["on"]["stats"]["shared_prompt_tokens"] > 0
    stats = found["on"]["stats"]
    assert stats["kv_bytes"] < stats["kv_bytes_without_sharing"]


@pytest.mark.thorough
def test_command_refuses_what_only_the_engine_can_judge(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(folder), "--load-format", "dummy", "--no-progress", "--prompt", "a"]
    for more, message in (
        (["--backend", "cuda"], "backend"),
        (["--max-model-len", "1000000"], "max_model_len"),
        (["--num-pages", "1"], "num_pages"),
        (["--tensor-parallel-size", "64"], "tensor_parallel_size"),
        (["--stop-token-id", "512"], "stop_token_ids"),
        (["--logprobs", "21"], "logprobs"),
    ):
        assert generate.main([*argv, *more]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert message in err


def test_four_threads_get_the_answers_of_one(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    prompts = [[f"{user} {i}" for user in USERS] for i in range(4)]

    def ask(mine: list[str]) -> list[str]:
        return [o.outputs[0].text for o in llm.generate(mine, params, use_tqdm=False)]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, prompts))
    assert together == [ask(mine) for mine in prompts]
