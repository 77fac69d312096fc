"""The bundled model answers the same, and rightly, by every way to the answer."""

import pytest

from rjax import LLM, SamplingParams
from rjax.models.tables.demo import demo_questions, demo_system_prompt
from tests.bundled import BUNDLED_SIZES

pytestmark = pytest.mark.usefixtures("optimised", "kept")

GREEDY = SamplingParams(temperature=0, max_tokens=40)
QUESTIONS = demo_questions()[:2]


def answers(conversations, **options):
    llm = LLM(use_tqdm=False, **BUNDLED_SIZES, **options)
    found = []
    for batch in conversations:
        outputs = llm.chat(batch, GREEDY, use_tqdm=False)
        found += [output.outputs[0].text.strip() for output in outputs]
    return found, llm.stats()


@pytest.fixture(scope="module")
def conversations():
    system = {"role": "system", "content": demo_system_prompt()}
    return [[system, {"role": "user", "content": question}] for question, _ in QUESTIONS]


def test_relay_on_off_and_alone_give_the_expected_answers(conversations):
    on, stats = answers([conversations], enable_relay_attention="on")
    assert stats.kv_tokens_read < stats.kv_tokens_unshared
    off, plain = answers([conversations], enable_relay_attention="off")
    assert plain.kv_tokens_read == plain.kv_tokens_unshared
    alone, _ = answers([[one] for one in conversations[:1]], enable_prefix_caching=False)
    assert on == off == [answer for _, answer in QUESTIONS]
    assert alone == on[:1]
