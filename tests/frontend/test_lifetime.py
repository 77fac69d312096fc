"""An engine's memory goes with the last reference to it, without the cycle collector, or by
`close`; and what is closed says so."""

import asyncio
import contextlib
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import jax
import pytest

from rjax.api.async_engine import AsyncLLMEngine
from rjax.api.beam_search import BeamSearchParams
from rjax.api.llm import LLM
from rjax.build.engine_builder import build_engine
from rjax.config import EngineConfig
from rjax.errors import EngineClosedError, InvalidRequestError
from rjax.sampling import SamplingParams, StructuredOutputsParams

from .fake_engine import FakeEngine
from .tiny_tokenizers import build

OPTIONS = {
    "load_format": "dummy",
    "page_size": 8,
    "num_pages": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "use_tqdm": False,
}
TALK = [{"role": "user", "content": "Hello"}]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def make(folder: pathlib.Path, **options: Any) -> LLM:
    return LLM(str(folder), **OPTIONS, **options)


def held() -> tuple[int, int]:
    """Arrays and compiled programs that are alive."""
    return len(jax.live_arrays()), len(jax.devices()[0].client.live_executables())


def ask(llm: LLM, prompt: Any = "Who?", params: SamplingParams = GREEDY, **more: Any) -> Any:
    return llm.generate(prompt, params, use_tqdm=False, **more)


def use(llm: LLM, path: pathlib.Path) -> list[Any]:
    """Everything that an LLM does, refusals included; what it gave back."""
    found = [ask(llm, ["Who?", "Where?", "When?"])]
    found.append(ask(llm, params=SamplingParams(max_tokens=400), timeout=0.001))
    found.append(llm.beam_search("Who?", BeamSearchParams(beam_width=2, max_tokens=2)))
    llm.add_prefix("rules", "Be brief, and say what is true. ")
    found.append(ask(llm, prefix="rules"))
    found.append(llm.score("Who?", [" I", " you"], use_tqdm=False))
    found.append(list(llm.stream("Who?", GREEDY)))
    for output in llm.stream(["Who?", "", "Where?"], GREEDY):
        found.append(output)
        break
    wanted = StructuredOutputsParams(choice=["a"])
    found.append(ask(llm, params=SamplingParams(temperature=0, structured_outputs=wanted)))
    llm.save_prefix("rules", path)
    llm.drop_prefix("rules")
    llm.load_prefix(path)
    llm.fill_prefix_kv_cache("Another beginning of all the prompts. ")
    some = ask(llm, ["Who?", [], [10**6], {"no": "prompt"}, "Where?"])
    assert [output.error is None for output in some] == [True, False, False, False, True]
    found.append(some)
    for bad in ({"prompt": 1}, [10**6], []):
        with pytest.raises(InvalidRequestError):
            ask(llm, bad)
        with pytest.raises(InvalidRequestError):
            llm.beam_search(bad)
    for talk in (TALK, [TALK, TALK]):
        refusing = "{{ raise_exception('no') }}"
        with contextlib.suppress(InvalidRequestError):
            found.append(llm.chat(talk, GREEDY, use_tqdm=False, chat_template=refusing))
    with pytest.raises(InvalidRequestError):
        ask(llm, prefix="unknown")
    found.append(llm.stats())
    return found


@pytest.mark.thorough
@pytest.mark.usefixtures("collector_off")
def test_the_last_reference_frees_everything(
    tiny_folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    before = held()[0]
    llm = make(tiny_folder)
    outputs = use(llm, tmp_path / "rules.safetensors")
    engine: Any = llm.engine
    programs = list(engine._worker._runner.programs._compiled.values())
    watched = [weakref.ref(each) for each in (llm, engine, engine._worker, *programs)]
    arrays, compiled = held()
    assert arrays > before
    count = len(programs)
    assert count >= 2
    del llm, engine, programs
    assert outputs
    assert [ref() for ref in watched] == [None] * (3 + count)
    assert held()[0] == before
    assert held()[1] <= compiled - count


@pytest.mark.slow
@pytest.mark.usefixtures("collector_off")
def test_close_frees_everything_and_is_told_of(tiny_folder: pathlib.Path) -> None:
    before = held()[0]
    with make(tiny_folder) as llm:
        assert "pages of 8 tokens" in repr(llm)
        assert str(tiny_folder) in repr(llm)
        ask(llm)
        engine: Any = llm.engine
        engine.add_request("left", [1, 2], GREEDY)
    assert held()[0] == before
    assert repr(llm) == "LLM(closed)"
    assert repr(engine) == f"LLMEngine({tiny_folder}, closed)"
    llm.close()
    engine.close()
    assert not engine.has_unfinished_requests()
    uses: list[Callable[[], Any]] = [
        lambda: ask(llm),
        lambda: llm.chat([{"role": "user", "content": "Hello"}]),
        lambda: llm.stream("Who?"),
        lambda: llm.stream_chat(TALK),
        lambda: llm.score("a", "b"),
        lambda: llm.beam_search("Who?"),
        lambda: llm.fill_prefix_kv_cache(None),
        lambda: llm.add_prefix("a", "b"),
        lambda: llm.drop_prefix("a"),
        lambda: llm.prefixes(),
        lambda: llm.save_prefix("a", "b"),
        lambda: llm.load_prefix("b"),
        lambda: llm.get_tokenizer(),
        lambda: llm.get_default_sampling_params(),
        lambda: llm.reset_prefix_cache(),
        lambda: llm.stats(),
        lambda: llm.__enter__(),
    ]
    for each in uses:
        with pytest.raises(EngineClosedError, match="this LLM is closed; make a new one"):
            each()
    of_the_engine: list[Callable[[], Any]] = [
        lambda: engine.add_request("r", [1], GREEDY),
        lambda: engine.step(),
        lambda: engine.set_shared_prefix([1]),
        lambda: engine.set_shared_prefix([]),
        lambda: engine.add_prefix("a", [1]),
        lambda: engine.drop_prefix("a"),
        lambda: engine.prefixes(),
        lambda: engine.save_prefix("a", "b"),
        lambda: engine.load_prefix("b"),
        lambda: engine.compile_progress(),
        lambda: engine.reset_prefix_cache(),
        lambda: engine.stats(),
    ]
    for each in of_the_engine:
        with pytest.raises(EngineClosedError, match="this LLMEngine is closed; make a new one"):
            each()


def test_an_engine_of_someone_else_stays_open() -> None:
    engine = FakeEngine(build("byte_level"))
    with LLM.from_engine(engine) as llm:
        ask(llm)
    with LLM.from_engine(engine) as llm:
        assert ask(llm)


@pytest.mark.thorough
@pytest.mark.usefixtures("collector_off")
def test_an_engine_behind_asyncio_goes_too(tiny_folder: pathlib.Path) -> None:
    engine = build_engine(EngineConfig.from_options({"model": str(tiny_folder), **OPTIONS}))
    watched = weakref.ref(engine)

    async def serve(served: AsyncLLMEngine) -> None:
        await served.start()
        async for _ in served.generate([1, 2], GREEDY):
            pass
        with pytest.raises(InvalidRequestError):
            await served.submit([10**6], GREEDY)
        await served.stop()

    served = AsyncLLMEngine(engine)
    asyncio.run(serve(served))
    del engine, served
    assert watched() is None
