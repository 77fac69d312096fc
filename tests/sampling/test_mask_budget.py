"""Budgets of masks: of one mask, of a request, and of an owner's slow masks within a minute."""

import math
from types import SimpleNamespace

import pytest

from rjax.structured import mask_budget
from rjax.structured.mask_budget import MaskBudget, OwnerBudget


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test can change."""
    now = [0.0]
    monkeypatch.setattr(mask_budget, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def budget(seconds=math.inf, one=math.inf, owner=None, constraint=1) -> MaskBudget:
    return MaskBudget(seconds, one, owner or OwnerBudget(math.inf), constraint)


def test_a_request_has_its_seconds_and_a_millisecond_a_token():
    made = budget(0.1)
    assert all(made.spend(0.002) for _ in range(99))
    assert not made.spend(0.01)
    assert "too long at each token" in made.exceeded


def test_one_mask_has_a_limit():
    made = budget(one=0.2)
    assert made.spend(0.2)
    assert not made.spend(0.3)
    assert made.exceeded == "the grammar takes 0.30 s at one token; 0.2 s are allowed"


def test_an_owner_gets_its_seconds_back_within_a_minute(clock):
    owner = OwnerBudget(2.0)
    made = budget(owner=owner)
    for _ in range(3):
        assert made.refusal() is None
        assert made.spend(0.7)
    assert "more than 2 s within a minute; ask again in 3 s" in made.refusal()
    assert budget(owner=owner, constraint=2).refusal() is not None  # another grammar of the owner
    assert budget(owner=OwnerBudget(2.0)).refusal() is None  # another owner
    clock[0] = 3.1
    assert made.refusal() is None


def test_grammars_that_were_quick_go_on(clock):
    owner = OwnerBudget(1.0)
    quick, slow = budget(owner=owner, constraint=1), budget(owner=owner, constraint=2)
    for _ in range(15):
        assert quick.spend(0.001)
    assert slow.spend(3.0)
    assert quick.refusal() is not None
    assert quick.spend(0.001)
    assert quick.refusal() is None
    assert slow.refusal() is not None
    quick.spend(0.02)
    assert quick.refusal() is not None


def test_quick_masks_are_no_owners_cost(clock):
    owner = OwnerBudget(0.5)
    made = budget(owner=owner)
    for _ in range(10_000):
        assert made.spend(0.009)
    assert budget(owner=owner, constraint=2).refusal() is None
    for constraint in range(2000):
        owner.count(constraint, 0.001)
    assert len(owner._quick) == 1024
