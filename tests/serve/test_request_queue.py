"""The queue of unfinished requests leaves every tenant its share."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rjax.api.request_queue import QueueLimits, RequestQueue
from rjax.errors import InvalidConfigError, OverloadedError
from rjax.serve.config.limits import ServeLimits
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.loading.service_builder import make_service
from tests.properties import num_examples

from .live_server import make_engine, zygote


def fits(queue: RequestQueue, tenant: str | None, sequences: int = 1, tokens: int = 1) -> bool:
    """Add a request if there is room."""
    try:
        queue.check(sequences, tokens, tenant)
    except OverloadedError:
        return False
    queue.add(sequences, tokens, tenant)
    return True


def fill(queue: RequestQueue, tenant: str | None) -> int:
    """The sequences that a tenant holds once it has taken all it can get."""
    while fits(queue, tenant):
        pass
    return queue.sequences[tenant]


def test_a_tenant_alone_leaves_the_other_half():
    queue = RequestQueue(QueueLimits(sequences=1024, tenant_share=0.5))
    assert [fits(queue, "a", 256) for _ in range(4)] == [True, True, False, False]
    assert fits(queue, "b", 256), "as large a request as there is"
    with pytest.raises(OverloadedError, match="kept for other API keys") as caught:
        queue.check(1, 1, "a")
    assert caught.value.reason == "key_share"


def test_without_shares_one_tenant_takes_all():
    queue = RequestQueue(QueueLimits(sequences=100))
    assert fill(queue, None) == 100
    with pytest.raises(OverloadedError, match="has no room for the 1 of this request") as caught:
        queue.check(1, 1, "b")
    assert caught.value.reason == "queued_sequences"


@given(
    tenants=st.integers(1, 6),
    share=st.sampled_from([0.25, 0.5, 0.75]),
    seed=st.integers(0, 99),
)
@settings(max_examples=num_examples(20), deadline=None)
def test_tenants_that_ask_for_all_get_equal_parts_and_leave_some(tenants, share, seed):
    """However they began: requests end, and others take their place."""
    size, order = 200, random.Random(seed)
    queue = RequestQueue(QueueLimits(sequences=size, tenant_share=share))
    names = [f"t{i}" for i in range(tenants)]
    for name in names:
        fill(queue, name)
    for _ in range(10 * size):
        name = order.choice(names)
        if queue.sequences[name]:
            queue.remove(1, 1, name)
        for other in order.sample(names, tenants):
            fits(queue, other)
    equal = share * size / (1 + (tenants - 1) * share)
    for name in names:
        assert abs(queue.sequences[name] - equal) <= tenants + 1
    assert fill(queue, "late") >= math.floor(share * (size - tenants * (equal + tenants + 1)))


def test_prompt_tokens_are_shared_likewise():
    queue = RequestQueue(QueueLimits(prompt_tokens=1000, tenant_share=0.5))
    assert fits(queue, "a", 1, 500)
    assert not fits(queue, "a", 1, 1)
    assert fits(queue, "b", 1, 250)
    queue.remove(1, 500, "a")
    assert fits(queue, "a", 1, 375)
    queue.remove(1, 375, "a")
    queue.remove(1, 250, "b")
    assert not queue.sequences
    assert not queue.prompt_tokens


@pytest.mark.parametrize("value", [0, -1, 1.01, math.nan])
def test_a_share_is_at_most_the_whole(value):
    with pytest.raises(InvalidConfigError, match=r"key_share is .*above 0, at most 1 \("):
        ServeLimits(key_share=value)
    assert ServeLimits(key_share=1.0).key_share == 1.0


@pytest.mark.parametrize(
    ("keys", "share", "whole"), [((), 0.5, True), (("a",), 0.5, True), (("a", "b"), 0.25, False)]
)
def test_only_several_keys_have_shares(folder, caplog, keys, share, whole):
    limits = ServeLimits(key_share=share, queued_sequences=8)
    config = ServeConfig(model="tiny", keys=keys, limits=limits)
    service = make_service(make_engine(folder), config, zygote=zygote())
    assert service.engine.limits.tenant_share == (1.0 if whole else share)
    service.close()
    assert ("one API key alone never fills the batch" in caplog.text) != whole
