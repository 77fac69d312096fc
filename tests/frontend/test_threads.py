"""Several threads on one LLM: their calls wait for one another."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rjax.api.llm import LLM
from rjax.errors import EngineClosedError
from rjax.outputs import RequestOutput
from rjax.sampling import SamplingParams

from .fake_engine import FakeEngine
from .tiny_tokenizers import build

TALK = [{"role": "user", "content": "Hello"}]
TEMPLATE = "{{ messages[0].content }}"


class OneThreadEngine(FakeEngine):
    """Notices threads that use it while another one has requests in it."""

    def __init__(self) -> None:
        super().__init__(build("byte_level"))
        self.user: int | None = None
        self.mixed = False

    def add_request(self, *given: Any, **options: Any) -> None:
        self._used()
        self.user = threading.get_ident()
        super().add_request(*given, **options)

    def step(self) -> list[RequestOutput]:
        self._used()
        time.sleep(0.002)  # others run meanwhile
        found = super().step()
        if not self.live:
            self.user = None
        return found

    def set_shared_prefix(self, token_ids: Any) -> None:
        self._used()
        super().set_shared_prefix(token_ids)

    def reset_prefix_cache(self) -> None:
        self._used()
        super().reset_prefix_cache()

    def stats(self) -> Any:
        self._used()
        return super().stats()

    def _used(self) -> None:
        self.mixed |= self.user not in (None, threading.get_ident())


def test_calls_of_several_threads_wait_for_one_another() -> None:
    engine = OneThreadEngine()
    llm = LLM.from_engine(engine)
    params = SamplingParams(max_tokens=3)
    uses: list[Callable[[], Any]] = [
        lambda: llm.generate(["one", "two"], params, use_tqdm=False),
        lambda: llm.chat(TALK, params, use_tqdm=False, chat_template=TEMPLATE),
        lambda: llm.fill_prefix_kv_cache("Be brief. "),
        lambda: llm.reset_prefix_cache(),
        lambda: llm.stats(),
        lambda: llm.generate("three", params, use_tqdm=False),
    ]
    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(use) for _ in range(10) for use in uses]:
            done.result()
    assert not engine.mixed
    assert not engine.live


def test_close_waits_for_the_call_of_another_thread() -> None:
    llm = LLM.from_engine(OneThreadEngine())
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: llm.generate(["a long one"] * 20, use_tqdm=False))
        while not llm.engine.has_unfinished_requests():
            assert not answer.done()
        llm.close()
        assert not llm.engine.has_unfinished_requests()
        assert all(output.finished for output in answer.result())
    with pytest.raises(EngineClosedError):
        llm.stats()
