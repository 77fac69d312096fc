"""LLM: order, forms of prompts, bad input, progress, and nothing left behind."""

import gc
import sys
from typing import Any

import numpy as np
import pytest

from rjax.api.llm import LLM
from rjax.api.request_runner import params_per_prompt
from rjax.config import RelaySettings
from rjax.errors import InvalidConfigError, InvalidRequestError
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.tokenization import Tokenizer

from .fake_engine import FakeEngine
from .tiny_tokenizers import build

SYS, USR = "{__SYS_PROMPT}", "{__USR_PROMPT}"


def make(kind: str = "byte_level", relay: RelaySettings | None = None, **options: Any) -> LLM:
    return LLM.from_engine(FakeEngine(build(kind), **options), relay)


def fake(llm: LLM) -> FakeEngine:
    assert isinstance(llm.engine, FakeEngine)
    return llm.engine


def quiet(llm: LLM, prompts: Any, params: Any = None, **options: Any) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False, **options)


class Bar:
    """Stands in for tqdm."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.moves, self.closed = settings, 0, False
        self.postfix = settings["postfix"]

    def update(self, n: int) -> None:
        self.moves += n

    def close(self) -> None:
        self.closed = True


def test_outputs_come_in_request_order_and_every_form_is_taken() -> None:
    llm = make()
    ids = llm.get_tokenizer().encode("token ids")
    prompts = [
        "a longer text than the others",
        ids,
        {"prompt": "short"},
        {"prompt_token_ids": tuple(ids)},
        {"prompt_token_ids": ids, "prompt": "shown"},
        np.array(ids),
    ]
    params = [SamplingParams(max_tokens=3 - i % 3) for i in range(len(prompts))]
    outputs = quiet(llm, prompts, params)
    texts = ["a longer text than the others", None, "short", None, "shown", None]
    assert [o.prompt for o in outputs] == texts
    for output, wanted in zip(outputs, params, strict=True):
        assert output.finished
        assert output.outputs[0].token_ids == output.prompt_token_ids[-3:][: wanted.max_tokens]
    assert outputs[1].prompt_token_ids == ids


def test_single_prompts_and_lists_of_one() -> None:
    llm = make()
    for single in ("text", [5, 6, 7], {"prompt": "text"}, np.array([5, 6]), ["text"], [[5, 6]]):
        assert len(quiet(llm, single)) == 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "empty"),
        ([], "empty list"),
        ([[]], "empty"),
        ([""], "empty"),
        ({}, "no key"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": "abc"}, "str"),
        ({"prompt": 5}, "int"),
        ({"prompts": "a"}, "prompts"),
        ({"prompt": "a", "multi_modal_data": 1}, "multi_modal_data"),
        (5, "int"),
        (None, "NoneType"),
        (b"bytes", "bytes"),
        ([1, "a"], "whole number"),
        ([1, 2.0], "whole number"),
        ([True, False], "whole number"),
        ([-1], "vocabulary"),
        ([2**31], "vocabulary"),
        ([600], "vocabulary"),
        ("x" * 5000, "maximum context length"),
        ("a\ud800", "surrogate"),
    ],
)
def test_bad_prompt_alone_is_an_error(prompts: Any, message: str) -> None:
    llm = make()
    with pytest.raises(InvalidRequestError, match=message):
        quiet(llm, prompts)
    assert not fake(llm).live
    assert fake(llm).steps == 0


def test_one_bad_prompt_harms_no_other() -> None:
    llm = make()
    bad: list[Any] = ["", None, [700], "a\ud800", "x" * 5000, {"prompt": 1}, [1, "a"], []]
    outputs = quiet(llm, ["first", *bad, "last"])
    assert [o.prompt for o in outputs][:1] + [o.prompt for o in outputs][-1:] == ["first", "last"]
    for index, output in enumerate(outputs):
        if 0 < index <= len(bad):
            assert isinstance(output.error, InvalidRequestError)
            assert str(output.error).startswith(f"prompts[{index}]: ")
            assert output.finished
            [ended] = output.outputs
            assert (ended.finish_reason, ended.text, ended.token_ids) == ("error", "", [])
            assert ended.stop_reason == str(output.error)
        else:
            assert output.error is None
            assert output.outputs[0].finish_reason == "length"
    alone = quiet(make(), ["first", "last"])
    assert [o.outputs for o in alone] == [outputs[0].outputs, outputs[-1].outputs]


def test_arguments_that_do_not_fit_are_refused() -> None:
    llm = make()
    for params, message in (
        ([SamplingParams()], "1 sampling_params for 2"),
        (SamplingParams(output_kind=RequestOutputKind.DELTA), "DELTA"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            quiet(llm, ["a", "b"], params)
    for wrong in ([SamplingParams(), None], 5, "ab"):
        with pytest.raises(InvalidRequestError, match="something other"):
            params_per_prompt(wrong, 2, SamplingParams, RequestOutputKind.FINAL_ONLY)
    with pytest.raises(InvalidRequestError, match="1 priorities for 2"):
        quiet(llm, ["a", "b"], priority=[1])
    quiet(llm, ["a", "b"], priority=[3, 1])
    assert [priority for *_, priority in fake(llm).seen] == [3, 1]


def test_parameters_the_model_cannot_serve_are_refused_per_prompt() -> None:
    llm = make()
    params = [SamplingParams(), SamplingParams(stop_token_ids=[10**6])]
    good, bad = quiet(llm, ["a", "b"], params)
    assert good.error is None
    assert isinstance(bad.error, InvalidRequestError)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("broken")])
def test_whatever_ends_generate_aborts_its_requests(failure: BaseException) -> None:
    llm = make()
    fake(llm).fail_at_step, fake(llm).failure = 2, failure
    bars: list[Bar] = []

    def bar(**settings: Any) -> Bar:
        bars.append(Bar(**settings))
        return bars[-1]

    params = [SamplingParams(max_tokens=1), SamplingParams(), SamplingParams()]
    with pytest.raises(type(failure)):
        llm.generate(["abc", "defg", "hijk"], params, use_tqdm=bar)
    assert not fake(llm).live
    assert sorted(fake(llm).aborted) == ["1", "2"]
    assert bars[0].closed
    assert len(quiet(llm, ["again"])) == 1


def test_collections_pass_over_what_existed_before_a_run(monkeypatch) -> None:
    llm, frozen = make(), []
    step = fake(llm).step

    def look() -> list[Any]:
        frozen.append(gc.get_freeze_count())
        return step()

    monkeypatch.setattr(fake(llm), "step", look)
    mine = [[] for _ in range(1000)]
    quiet(llm, ["a", "b"])
    assert min(frozen) > len(mine)
    assert gc.get_freeze_count() == 0


def test_the_engine_begins_before_a_long_batch_is_taken_in(monkeypatch) -> None:
    llm, seen = make(), []
    step = fake(llm).step

    def look() -> list[Any]:
        seen.append(len(fake(llm).seen))
        return step()

    monkeypatch.setattr(fake(llm), "step", look)
    prompts: list[Any] = [[1 + i % 500, 2, 3] for i in range(150)]
    prompts[70] = 5.0
    outputs = quiet(llm, prompts)
    assert [output.prompt_token_ids for output in outputs if output.error is None] == [
        prompt for prompt in prompts if prompt != 5.0
    ]
    assert seen[:5] == [32, 64, 95, 127, 149]
    seen.clear()
    quiet(llm, [[1, 2]] * 150, priority=[i % 3 for i in range(150)])
    assert seen[0] == 149 + 150


def test_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, bars = make(), []

    def bar(**settings: Any) -> Bar:
        bars.append(Bar(**settings))
        return bars[-1]

    outputs = llm.generate(["abc", "", "defg"], SamplingParams(n=2), use_tqdm=bar)
    assert bars[0].settings == {
        "total": 3,
        "desc": "Processed prompts",
        "dynamic_ncols": True,
        "postfix": "est. speed input: 0.00 toks/s, output: 0.00 toks/s",
    }
    assert bars[0].moves == 3
    assert bars[0].closed
    read, written = bars[0].postfix.removeprefix("est. speed input: ").split(" toks/s, output: ")
    tokens = sum(len(o.prompt_token_ids) for o in outputs)
    speed = float(read) / float(written.removesuffix(" toks/s"))
    both = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    assert speed == pytest.approx(tokens / both, rel=0.01)
    llm.generate("abc")
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate("abc")
    assert "Processed prompts: 100%" in capsys.readouterr().err
    llm.generate("abc", use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_system_prompt_goes_before_texts_only(tokenizer: Tokenizer) -> None:
    schema = f"[{SYS}]\n{USR} ->"
    engine = FakeEngine(tokenizer)
    llm = LLM.from_engine(engine, RelaySettings(sys_prompt="A table.", sys_schema=schema))
    text, ids = quiet(llm, ["who?", [5, 6, 7]])
    assert text.prompt_token_ids == tokenizer.encode("[A table.]\nwho? ->")
    assert text.prompt == "who?"
    assert ids.prompt_token_ids == [5, 6, 7]
    assert text.num_cached_tokens == len(engine.prefix) > 0


def test_shared_prefix_is_replaced_at_run_time() -> None:
    llm = make()
    plain = quiet(llm, "who?")[0].prompt_token_ids
    llm.fill_prefix_kv_cache("First. ")
    first = list(fake(llm).prefix)
    llm.fill_prefix_kv_cache("Second table. ")
    assert fake(llm).prefix != first
    second = quiet(llm, "who?")[0]
    assert llm.get_tokenizer().decode(second.prompt_token_ids) == "Second table. who?"
    assert second.num_cached_tokens > 0
    llm.fill_prefix_kv_cache([5, 6, 7])
    assert fake(llm).prefix == [5, 6, 7]
    llm.fill_prefix_kv_cache(None)
    assert fake(llm).prefix == []
    assert quiet(llm, "who?")[0].prompt_token_ids == plain
    llm.reset_prefix_cache()
    assert fake(llm).cache_resets == 1


def test_chat_uses_the_template() -> None:
    llm = make("byte_level_bos")
    first = [{"role": "system", "content": "A table."}, {"role": "user", "content": "who?"}]
    text = (
        "<|im_start|>system\nA table.<|im_end|>\n<|im_start|>user\nwho?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    output = llm.chat(first, use_tqdm=False)[0]
    assert output.prompt == text
    assert output.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)
    second = [{"role": "user", "content": [{"type": "text", "text": "and"}]}]
    both = llm.chat([first, second], use_tqdm=False)
    assert [o.prompt is not None and "assistant" in o.prompt for o in both] == [True, True]
    own = llm.chat(
        second,
        use_tqdm=False,
        chat_template="{{ messages[0].content }}|{{ mood }}",
        chat_template_kwargs={"mood": "good"},
    )
    assert own[0].prompt == "and|good"
    kept = [*second, {"role": "assistant", "content": "so"}]
    open_end = llm.chat(
        kept, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    assert open_end[0].prompt is not None
    assert open_end[0].prompt.endswith("so")


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "empty"),
        ("hello", {}, "str"),
        ([{"content": "a"}], {}, "role"),
        ([{"role": "user"}], {}, "content"),
        ([{"role": "user", "content": 5}], {}, "int"),
        ([5], {}, "int"),
        ([[]], {}, "empty"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "image_url"),
        ([{"role": "user", "content": "a"}], {"chat_template": "{{ oops"}, "template"),
        (
            [{"role": "user", "content": "a"}],
            {"chat_template": "{{ raise_exception('no such role') }}"},
            "no such role",
        ),
        (
            [{"role": "user", "content": "a"}],
            {"chat_template": "{{ messages.__class__.__mro__ }}"},
            "unsafe|template",
        ),
        ([{"role": "user", "content": "a"}], {"chat_template": "{% if 0 %}{% endif %}"}, "empty"),
        ([{"role": "user", "content": "a"}], {"continue_final_message": True}, "exclude"),
        (
            [{"role": "user", "content": "a"}],
            {"chat_template_kwargs": {"tokenize": True}},
            "kwargs",
        ),
    ],
)
def test_bad_conversations(messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make().chat(messages, use_tqdm=False, **options)


def test_one_bad_conversation_harms_no_other() -> None:
    good = [{"role": "user", "content": "a"}]
    outputs = make().chat([good, [{"role": 5}], good], use_tqdm=False)
    assert [o.error is None for o in outputs] == [True, False, True]


def test_without_tokenizer_only_token_ids() -> None:
    llm = LLM.from_engine(FakeEngine(None))
    assert quiet(llm, [1, 2])[0].outputs[0].text == ""
    for call in (lambda: quiet(llm, "text"), lambda: llm.chat([{"role": "user", "content": "a"}])):
        with pytest.raises(InvalidRequestError, match="token ids"):
            call()


def test_options_are_checked_before_anything_loads() -> None:
    with pytest.raises(InvalidConfigError, match="max_num_seqs"):
        LLM(max_num_seq=3)
    with pytest.raises(InvalidConfigError, match="page_size"):
        LLM(page_size=7)
    with pytest.raises(InvalidConfigError, match="enable_lora"):
        LLM(enable_lora=True)
