"""An engine takes sequences of the length that rope scaling stretches a model to."""

import json

import pytest

from rjax.errors import InvalidConfigError
from rjax.sampling import SamplingParams

from .tiny import CONFIG, make_engine, run

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def folder(tmp_path, **change):
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | {"max_position_embeddings": 32} | change)
    )
    return tmp_path


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_the_default_is_the_stretched_context(tmp_path, spelling):
    engine = make_engine(folder(tmp_path, **{spelling: YARN}))
    prompt = [i % 97 for i in range(100)]
    params = SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True)
    done = run(engine, [("a", prompt, params)])
    assert len(done["a"].outputs[0].token_ids) == 28
    with pytest.raises(InvalidConfigError, match=r"max_model_len is 129; .* positions up to 128"):
        make_engine(tmp_path, max_model_len=129)


def test_the_angles_of_dynamic_decide_its_default(tmp_path):
    dynamic = {"type": "dynamic", "factor": 4.0}
    engine = make_engine(folder(tmp_path, rope_scaling=dynamic))
    assert engine.max_model_len == 32
    assert make_engine(tmp_path, max_model_len=128).max_model_len == 128
