"""Names of vLLM's Python API: what is re-exported works, what is missing says why."""

import argparse
import asyncio
import dataclasses
import importlib.util
import warnings
import weakref
from pathlib import Path

import pytest

import rjax
import rjax.config
from rjax import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    SamplingParams,
    StructuredOutputsParams,
)
from rjax.api.beam_search import BeamSearchOutput
from rjax.api.prompts import Prompt, parse_prompt
from rjax.errors import InvalidConfigError, InvalidRequestError
from rjax.inputs import TextPrompt, TokensPrompt
from rjax.lora.request import LoRARequest
from rjax.outputs import CompletionOutput
from rjax.sampling_params import GuidedDecodingParams
from rjax.utils.argparse_utils import FlexibleArgumentParser
from rjax.vllm.modules import HOMES, MISSING, cleanup_dist_env_and_memory
from rjax.vllm.names import (
    ARGUMENTS,
    CONFIG_CLASSES,
    METHODS,
    PROMPT_KEYS,
    RESET_ARGUMENTS,
    SAMPLING_FIELDS,
    STRUCTURED_FIELDS,
    config_class,
)

from .fake_engine import FakeEngine
from .tiny_tokenizers import build


@pytest.fixture(scope="module")
def llm():
    with LLM.from_engine(FakeEngine(build("byte_level"))) as made:
        yield made


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("sampling_params", "SamplingParams RequestOutputKind StructuredOutputsParams"),
        ("sampling_params", "BeamSearchParams GuidedDecodingParams"),
        ("inputs", "TextPrompt TokensPrompt PromptType"),
        ("outputs", "RequestOutput CompletionOutput"),
        ("engine.arg_utils", "EngineArgs AsyncEngineArgs"),
        ("lora.request", "LoRARequest"),
        ("utils", "FlexibleArgumentParser"),
        ("engine.async_llm_engine", "AsyncLLMEngine"),
        ("entrypoints.llm", "LLM"),
        ("v1.engine.async_llm", "AsyncLLM"),
        ("v1.engine.llm_engine", "LLMEngine"),
        ("v1.core.kv_cache_utils", "ExternalBlockHash"),
        ("logger", "init_logger"),
        ("distributed", "cleanup_dist_env_and_memory"),
    ],
)
def test_a_name_is_where_vllm_has_it_and_one_object(module, names):
    found = importlib.import_module(f"rjax.{module}")
    for name in names.split():
        assert hasattr(found, name)
        if name in rjax.__all__:
            assert getattr(found, name) is getattr(rjax, name)


def test_an_async_engine_is_an_async_llm():
    assert rjax.AsyncLLMEngine is AsyncLLM


@pytest.mark.parametrize("name", sorted(MISSING))
def test_a_module_that_is_missing_says_why(name):
    with pytest.raises(ModuleNotFoundError, match=f"^rjax has no module {name}.*: ") as found:
        importlib.import_module(f"rjax.{name}.part")
    assert found.value.args[0].endswith(MISSING[name])


def test_other_modules_are_errors_as_ever():
    for name in ("rjax.nothing", "rjax.v1.nothing", "rjax.v1.engine.nothing", "rjaxes.v1"):
        with pytest.raises(ModuleNotFoundError, match=r"^No module named"):
            importlib.import_module(name)
    with pytest.raises(ImportError, match="cannot import name 'AsyncLM'"):
        from rjax.v1.engine.async_llm import AsyncLM  # noqa: F401, since importing it is the test


def test_modules_that_are_files_come_first():
    for name in HOMES:
        assert not (Path(rjax.__file__).parent / f"{name.replace('.', '/')}.py").exists()
    found = importlib.util.find_spec("rjax.utils.argparse_utils")
    assert found is not None and found.origin is not None and found.origin.endswith(".py")


def test_memory_that_nothing_refers_to_is_freed():
    class Held:
        pass

    held = Held()
    held.itself = held  # pyright: ignore[reportAttributeAccessIssue]
    seen = weakref.ref(held)
    del held
    cleanup_dist_env_and_memory()
    assert seen() is None


def test_prompts_of_typed_dicts():
    assert parse_prompt(TextPrompt(prompt="a")) == Prompt("a", None)
    assert parse_prompt(TokensPrompt(prompt_token_ids=[1, 2])) == Prompt(None, [1, 2])
    both = TokensPrompt(prompt_token_ids=[1], prompt="b")
    assert parse_prompt({**both, "multi_modal_data": None}) == Prompt("b", [1])


@pytest.mark.parametrize("name", sorted(PROMPT_KEYS))
def test_a_key_of_a_prompt_that_is_missing_says_why(name):
    with pytest.raises(InvalidRequestError, match=f"has {name}: "):
        parse_prompt({"prompt": "a", name: {"image": b""}})
    assert parse_prompt({"prompt": "a", name: None}) == Prompt("a", None)
    with pytest.raises(InvalidRequestError, match="no key"):
        parse_prompt({name: None})


@pytest.mark.parametrize("name", sorted(SAMPLING_FIELDS))
def test_a_field_of_sampling_params_that_is_missing_says_why(name):
    with pytest.raises(InvalidRequestError, match=f"SamplingParams has no {name}: "):
        SamplingParams(**{name: "on"})
    assert SamplingParams(**{name: None}) == SamplingParams()


def test_values_that_ask_for_what_happens_anyway_are_accepted():
    given = {"skip_clone": True, "stream_interval": 1, "prompt_logprob_start": 0}
    assert SamplingParams(**given) == SamplingParams()  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequestError, match="num_decode_steps of the engine"):
        SamplingParams(stream_interval=2)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("name", sorted(STRUCTURED_FIELDS))
def test_a_field_of_structured_outputs_that_is_missing_says_why(name):
    with pytest.raises(InvalidRequestError, match=f"StructuredOutputsParams has no {name}: "):
        StructuredOutputsParams(regex="a", **{name: "on"})
    assert StructuredOutputsParams(regex="a", **{name: None}).regex == "a"


def test_other_fields_are_errors_as_ever():
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        SamplingParams(temprature=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(InvalidRequestError, match="compared by the model's own"):
        BeamSearchParams(temperature=0.5)  # pyright: ignore[reportCallIssue]
    assert BeamSearchParams(temperature=0.0) == BeamSearchParams()  # pyright: ignore[reportCallIssue]
    assert dataclasses.replace(SamplingParams(n=2), n=3).n == 3


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
@pytest.mark.parametrize("call", ["generate", "chat", "beam_search", "async"])
def test_an_argument_that_is_missing_says_why(llm, call, name):
    prompt = [{"role": "user", "content": "a"}] if call == "chat" else [1, 2]

    async def generate(**given):
        async with AsyncLLM.from_engine(FakeEngine(build("byte_level"))) as made:
            async for _ in made.generate([1, 2], SamplingParams(max_tokens=1), **given):
                pass

    def ask(**given):
        if call == "async":
            return asyncio.run(generate(**given))
        return getattr(llm, call)(prompt, **given)

    with pytest.raises(InvalidRequestError, match=rf"LLM.\w+ has no {name}: "):
        ask(**{name: "on"})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        ask(nothing=None)


@pytest.mark.parametrize("name", sorted(RESET_ARGUMENTS))
def test_what_a_reset_does_not_do_is_said(llm, name):
    with pytest.raises(InvalidRequestError, match=rf"LLM.reset_prefix_cache has no {name}: "):
        llm.reset_prefix_cache(**{name: True})
    llm.reset_prefix_cache(**{name: False})


def test_one_priority_is_of_all_prompts(llm):
    params = SamplingParams(max_tokens=1)
    llm.engine.seen.clear()
    llm.generate([[1, 2], [3, 4]], params, priority=7)
    assert [priority for *_, priority in llm.engine.seen] == [7, 7]


def test_arguments_that_ask_for_nothing_are_accepted(llm):
    params = SamplingParams(max_tokens=2)
    given = {"lora_request": None, "use_tqdm": False, "tokenization_kwargs": {}}
    assert len(llm.generate([1, 2], params, **given)[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_that_is_missing_says_why(llm, name):
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"LLM.{name} is not supported: "):
        getattr(llm, name)


def test_other_attributes_are_errors_as_ever(llm):
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'generat'"):
        llm.generat([1])
    assert llm.llm_engine is llm.engine


@pytest.mark.parametrize(
    "kind",
    [LoRARequest, GuidedDecodingParams, rjax.PoolingParams, *map(config_class, CONFIG_CLASSES)],
)
def test_a_class_that_is_missing_can_be_imported_and_says_why(kind):
    with pytest.raises(InvalidRequestError, match=f"{kind.__name__}: "):
        kind("name", 1, "path")


@pytest.mark.parametrize("name", CONFIG_CLASSES)
def test_a_class_of_vllms_config_is_there(name):
    assert getattr(rjax.config, name) is config_class(name)
    assert config_class(name).__name__ == name
    assert not hasattr(rjax.config, f"{name}s")


def test_engine_args_are_the_options():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        args = EngineArgs(max_model_len=512, block_size=64, enforce_eager=True)
    assert [str(w.message).split()[0] for w in caught] == ["enforce_eager"]
    assert (args.model, args.max_model_len, args.page_size) == (None, 512, 64)
    assert EngineArgs(**dataclasses.asdict(args)).max_model_len == 512  # and no warning
    assert "secret" not in repr(EngineArgs(hf_token="secret"))
    with pytest.raises(InvalidConfigError, match="nearest is 'max_num_seqs'"):
        EngineArgs(max_num_sequences=3)
    with pytest.raises(InvalidConfigError, match="adapters are not supported"):
        AsyncEngineArgs(enable_lora=True)


def test_engine_args_of_a_command_line():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.set_defaults(max_model_len=256)
    given = parser.parse_args(["--max-num-seqs", "4"])
    assert vars(given) == {"max_model_len": 256, "max_num_seqs": 4}
    args = AsyncEngineArgs.from_cli_args(given)
    assert isinstance(args, AsyncEngineArgs)
    assert (args.max_num_seqs, args.max_model_len, args.seed) == (4, 256, 0)


@pytest.mark.parametrize(
    "argv",
    [["--max_model_len", "1k"], ["--max-model-len=1k"], ["--model", "m", "--max_model_len=1k"]],
)
def test_the_parser_of_vllms_examples(argv):
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="default")
    parser.add_argument("--max-tokens", type=int)
    given = vars(parser.parse_args(argv))
    model = "m" if "m" in argv else "default"
    assert given == {"model": model, "max_model_len": 1000, "max_tokens": None}


def test_the_parser_says_what_takes_the_place_of_a_flag(capsys):
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--enable_lora"])
    assert "adapters are not supported" in capsys.readouterr().err


def test_fields_can_be_set_with_the_checks_of_the_constructor():
    params = SamplingParams(top_p=0.5)
    params.max_tokens = 3
    params.stop = "end"
    assert params == SamplingParams(top_p=0.5, max_tokens=3, stop=["end"])
    before = params.clone()
    for name, value, said in (
        ("temperature", -1, "temperature is -1"),
        ("best_of", 0, "best_of is 0"),
        ("max_token", 3, "the nearest is 'max_tokens'"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            setattr(params, name, value)
    assert params == before
    params.temperature = 0.0
    assert params.greedy and not before.greedy


def test_requests_keep_the_values_that_they_were_given():
    with LLM.from_engine(FakeEngine(build("byte_level"))) as llm:
        params = SamplingParams(max_tokens=4)
        stream = llm.stream([[1, 2, 3], [4, 5, 6]], params)
        params.max_tokens = 1
        tokens = [0, 0]
        for output in stream:
            tokens[output.prompt_index] += len(output.outputs[0].token_ids)
    assert tokens == [3, 3]


def test_an_async_llm_from_engine_args():
    args = AsyncEngineArgs(max_model_len=64, max_num_seqs=2, num_pages=8, warmup="off")
    made = AsyncLLMEngine.from_engine_args(args, usage_context="API", start_engine_loop=True)
    made.shutdown(timeout=30)
    for given in ({"stat_loggers": [print]}, {"start_engine_loop": "no"}):
        with pytest.raises(InvalidRequestError, match=r"AsyncLLM\.from_engine_args has no "):
            AsyncLLM.from_engine_args(args, **given)


def test_an_llm_from_engine_args():
    args = EngineArgs(max_model_len=64, max_num_seqs=2, num_pages=8, warmup="off")
    with LLM.from_engine_args(args) as llm:
        assert llm.engine.max_model_len == 64


def test_sequences_of_a_beam_search():
    beams = [
        CompletionOutput(0, " b", [3, 4], cumulative_logprob=-1.0, finish_reason="stop"),
        CompletionOutput(1, " c", [5], cumulative_logprob=-2.0, finish_reason="length"),
    ]
    found = BeamSearchOutput("r", "a", [1, 2], outputs=beams, finished=True).sequences
    assert [s.tokens for s in found] == [[1, 2, 3, 4], [1, 2, 5]]
    assert [(s.text, s.cum_logprob, s.finish_reason) for s in found] == [
        ("a b", -1.0, "stop"),
        ("a c", -2.0, "length"),
    ]
