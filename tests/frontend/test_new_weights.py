"""New weights for an LLM, and for an AsyncLLM whose requests go on."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from rjax import LLM, AsyncLLM
from rjax.errors import EngineClosedError, EnginePausedError, InvalidWeightsError
from rjax.models import config_from_dict
from rjax.sampling import SamplingParams
from tests.models.trainers import checkpoint, tunix
from tests.slow_steps import slow_steps

from .conftest import TINY_OPTIONS

pytestmark = pytest.mark.usefixtures("kept")

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13]}


@pytest.fixture(scope="module")
def config(tiny_folder):
    return config_from_dict(json.loads((tiny_folder / "config.json").read_text()))


def weights(config, seed):
    return {name: np.float32(0.3) * tensor for name, tensor in checkpoint(config, seed).items()}


def answer(llm, prompt=PROMPT):
    return llm.generate(prompt, PARAMS)[0].outputs[0]


def test_an_llm(tiny_folder, config):
    with LLM(str(tiny_folder), sys_prompt="be brief", **TINY_OPTIONS) as llm:
        before = answer(llm, "why?")
        assert llm.weights_version == 0 and before.weights_versions == [0] * 24
        assert llm.update_weights(weights(config, 1)) == 1
        first = answer(llm, "why?")
        assert first.token_ids != before.token_ids and first.weights_versions == [1] * 24
        assert llm.update_weights(tunix(weights(config, 2), config), mapping="tunix") == 2
        assert answer(llm, "why?").token_ids != first.token_ids
        # In parts, while a stream runs; the system prompt is computed again.
        stream = llm.stream("why?", PARAMS)
        versions = list(next(stream).outputs[0].weights_versions)
        llm.start_weight_update()
        for name, tensor in weights(config, 1).items():
            llm.add_weights({name: tensor})
        assert llm.finish_weight_update("keep") == llm.weights_version == 3
        versions += [v for output in stream for v in output.outputs[0].weights_versions]
        assert len(versions) == 24 and versions == sorted(versions) and set(versions) == {2, 3}
        assert answer(llm, "why?").token_ids == first.token_ids
        with pytest.raises(InvalidWeightsError, match=r"model\.norm\.weight has the shape"):
            llm.update_weights({"model.norm.weight": np.zeros(3)}, partial=True)
        assert answer(llm, "why?").token_ids == first.token_ids
        llm.start_weight_update(partial=True)
        llm.cancel_weight_update()
        norm = {"model.norm.weight": weights(config, 2)["model.norm.weight"]}
        assert llm.update_weights(norm, partial=True) == 4
    with pytest.raises(EngineClosedError):
        llm.update_weights({})


@pytest.mark.parametrize("process", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_async_llm(process, tiny_folder, config):
    async def last(llm):
        outputs = [output async for output in llm.generate(PROMPT, PARAMS)]
        return outputs[-1].outputs[0]

    async def started(llm):
        """A request that runs."""
        outputs = llm.generate(PROMPT, PARAMS)
        await anext(outputs)

        async def rest():
            return [output async for output in outputs][-1].outputs[0]

        return asyncio.create_task(rest())

    async def whole():
        async with AsyncLLM(str(tiny_folder), engine_process=process, **TINY_OPTIONS) as llm:
            old = await last(llm)
            assert await llm.update_weights(weights(config, 1)) == llm.weights_version == 1
            first = await last(llm)
            assert first.token_ids != old.token_ids and first.weights_versions == [1] * 24
            running = await started(llm)
            assert await llm.update_weights(weights(config, 2), mode="wait") == 2
            assert (await running).token_ids == first.token_ids
            running = await started(llm)
            await llm.start_weight_update()
            for name, tensor in weights(config, 1).items():
                await llm.add_weights([(name, tensor)])
            assert await llm.finish_weight_update("abort") == 3
            assert (await running).finish_reason in ("abort", "length")
            assert (await last(llm)).token_ids == first.token_ids
            with pytest.raises(InvalidWeightsError, match="are missing; give all tensors"):
                await llm.update_weights({"lm_head.weight": weights(config, 1)["lm_head.weight"]})
            await llm.cancel_weight_update()
            assert (await last(llm)).token_ids == first.token_ids

    asyncio.run(whole())


def test_a_prefix_while_an_update_waits(tiny_folder, config):
    """It is refused: the engine would wait for the prefix, and the prefix for the update."""

    async def add_until(done, llm):
        while not done():
            await llm.add_prefix("brief", [1, 2, 3])
            await asyncio.sleep(0.01)

    async def whole():
        async with AsyncLLM(str(tiny_folder), engine_process=False, **TINY_OPTIONS) as llm:
            with slow_steps(llm._engine, 0.1):
                outputs = llm.generate(PROMPT, dataclasses.replace(PARAMS, max_tokens=200))
                await anext(outputs)
                update = asyncio.create_task(llm.update_weights(weights(config, 1)))
                with pytest.raises(EnginePausedError, match="an update of the weights waits"):
                    await add_until(update.done, llm)
            assert await update == 1
            await llm.add_prefix("brief", [1, 2, 3])
            assert [output async for output in outputs][-1].finished
            assert await llm.prefixes() == ["brief"]

    asyncio.run(asyncio.wait_for(whole(), 120))
