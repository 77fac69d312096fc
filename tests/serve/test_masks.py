"""Sequences under a grammar run every step, beside others too, though masks need the last token."""

import asyncio

import pytest

from rjax.sampling import SamplingParams
from rjax.serve.service_builder import make_service
from rjax.structured.constraint import Constraint

from .live_server import make_engine, zygote


@pytest.mark.parametrize("plain", [0, 2])
def test_steps_of_a_masked_token(folder, plain):
    engine = make_engine(folder)
    service = make_service(engine, model="tiny", zygote=zygote())

    async def compiled():
        try:
            return await service.grammars.masks(Constraint("regex", "[ab]{24}"), 2, "anyone")
        finally:
            service.close()

    masks = asyncio.run(compiled())
    for i, mask in enumerate(masks):
        params = SamplingParams(max_tokens=40, seed=3)  # the same tokens, so the same length
        engine.add_request(f"masked {i}", [5, 6, 7], params, masks=[mask])
    for i in range(plain):
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        engine.add_request(f"plain {i}", [5, 6, 7], params)
    ended = []
    while len(ended) < len(masks):
        ended += [o.outputs[0] for o in engine.step() if o.request_id.startswith("masked")]
        ended = [o for o in ended if o.finished()]
    assert set(ended[0].text) <= {"a", "b"}
    assert len(ended[0].text) == 24
    # The end is known when one more step is under way.
    assert engine.stats().steps - len(ended[0].token_ids) in (0, 1)
