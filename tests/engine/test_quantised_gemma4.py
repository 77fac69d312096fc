"""Engines on quantised checkpoints of Gemma 4: the tokens of the weights that the files mean."""

import json

import pytest

from rjax.models import config_from_folder
from rjax.models.quantising import choose_settings, quantise_checkpoint
from rjax.sampling import SamplingParams
from tests.models.gemma4_configs import LARGE, MIXTURE, SMALL, text_of, whole_of
from tests.models.plain_checkpoints import decoded, write_plain, write_tensors
from tests.models.quantised_files import write_quantised

from .tiny import make_engine, run

pytestmark = [
    pytest.mark.usefixtures("no_annotations_checked"),
    pytest.mark.usefixtures("kept"),
]

PREFIX = list(range(3, 30))
REQUESTS = [
    (str(i), prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for i, prompt in enumerate(([*PREFIX, 1], [*PREFIX, 2, 9], [5] * 20, [7]))
]


def answers(folder) -> dict[str, list[int]]:
    engine = make_engine(folder, load_format="auto", num_pages=40, max_model_len=64)
    done = run(engine, REQUESTS)
    engine.close()
    return {name: output.outputs[0].token_ids for name, output in done.items()}


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize(
    ("values", "form"),
    [
        (whole_of(MIXTURE), "fp8-dynamic"),
        (whole_of(SMALL), "w4a16"),
        (text_of(LARGE), "gptq"),
        (text_of(SMALL), "gptq"),
        (whole_of(MIXTURE), "w4a16-asym"),
        (whole_of(LARGE), "fp8-block"),
    ],
)
def test_tokens_are_those_of_the_dequantised_weights(tmp_path, values, form):
    quantised, plain = write_quantised(tmp_path, values, form, seed=4)
    assert answers(quantised) == answers(plain)


@pytest.mark.thorough
@pytest.mark.parametrize(("sizes", "scheme"), [(SMALL, "fp8"), (MIXTURE, "int4")])
def test_what_the_command_quantize_writes_is_served(tmp_path, sizes, scheme):
    source = write_plain(tmp_path / "source", whole_of(sizes))
    settings = choose_settings(config_from_folder(source), scheme)
    quantise_checkpoint(source, tmp_path / "out", settings, progress=False)
    values = json.loads((source / "config.json").read_text())
    meant = write_tensors(tmp_path / "meant", values, decoded(tmp_path / "out"))
    assert answers(tmp_path / "out") == answers(meant)
