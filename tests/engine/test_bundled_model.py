"""The bundled model answers the same, and rightly, by every way to the answer."""

import pytest

from bench.train_bundled_model.make_demo import demo_table
from bench.train_bundled_model.table import Table, system_prompt
from rjax import LLM, SamplingParams
from tests.bundled import BUNDLED_SIZES

pytestmark = pytest.mark.usefixtures("optimised", "kept")

GREEDY = SamplingParams(temperature=0, max_tokens=40)
TABLE = Table(demo_table().columns, demo_table().rows[:6])
PEOPLE = [dict(zip(TABLE.columns, row, strict=True)) for row in TABLE.rows[2:4]]
QUESTIONS = [
    (
        f"Where does {person['name']} live?",
        f"The country of {person['name']} is {person['country']}.",
    )
    for person in PEOPLE
]


def answers(conversations, **options):
    llm = LLM(use_tqdm=False, **BUNDLED_SIZES, **options)
    found = []
    for batch in conversations:
        outputs = llm.chat(batch, GREEDY, use_tqdm=False)
        found += [output.outputs[0].text.strip() for output in outputs]
    return found, llm.stats()


@pytest.fixture(scope="module")
def conversations():
    system = {"role": "system", "content": system_prompt(TABLE)}
    return [[system, {"role": "user", "content": question}] for question, _ in QUESTIONS]


@pytest.mark.thorough
def test_relay_on_off_and_alone_give_the_expected_answers(conversations):
    on, stats = answers([conversations], enable_relay_attention="on")
    assert stats.kv_tokens_read < stats.kv_tokens_unshared
    off, plain = answers([conversations], enable_relay_attention="off")
    assert plain.kv_tokens_read == plain.kv_tokens_unshared
    alone, _ = answers([[one] for one in conversations[:1]], enable_prefix_caching=False)
    assert on == off == [answer for _, answer in QUESTIONS]
    assert alone == on[:1]
