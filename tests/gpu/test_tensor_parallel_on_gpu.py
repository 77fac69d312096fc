"""Engines on several GPUs: the tokens of one up to rounding, and the same bits in every run."""

import jax
import pytest
from test_families_on_gpu import answers, folder, same_up_to_rounding

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _two_gpus():
    if jax.device_count() < 2:
        pytest.skip("one GPU")


def logprobs(outputs) -> list:
    return [
        [{t: entry.logprob for t, entry in row.items()} for row in output.logprobs]
        for output in outputs
    ]


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_tokens_are_those_of_one_gpu_and_runs_are_equal(devices, tmp_path):
    if jax.device_count() < devices:
        pytest.skip(f"{jax.device_count()} GPUs")
    path = folder(tmp_path, "llama")
    alone, _ = answers(path, 12, backend="mosaic")
    several, llm = answers(path, 12, backend="mosaic", tensor_parallel_size=devices)
    same_up_to_rounding(several, alone)
    sums = {use.kernel for use in llm.kernels() if use.operation.startswith("all_reduce")}
    exchanged = {f"mosaic.all_reduce{end}" for end in ("", "_rms_norm", "_argmax")}
    if devices == 2:
        assert sums == exchanged
    else:  # the buffers of more devices hold fewer rows: prompts may take XLA's sums
        assert exchanged <= sums <= exchanged | {"xla.all_reduce"}
    again, _ = answers(path, 12, backend="mosaic", tensor_parallel_size=devices)
    assert [output.token_ids for output in again] == [output.token_ids for output in several]
    assert logprobs(again) == logprobs(several)


def test_collectives_of_xla_take_the_place_of_the_exchange(tmp_path, monkeypatch):
    """They add the same numbers in the same order; the norm is another kernel's."""
    path = folder(tmp_path, "llama")
    pair, _ = answers(path, 5, backend="mosaic", tensor_parallel_size=2)
    monkeypatch.setattr("rjax.worker.worker.make_peer_memory", lambda mesh, numbers: (None, None))
    plain, llm = answers(path, 5, backend="mosaic", tensor_parallel_size=2)
    sums = {use.kernel for use in llm.kernels() if use.operation.startswith("all_reduce")}
    assert sums == {"xla.all_reduce", "xla.all_reduce_argmax"}
    same_up_to_rounding(plain, pair)
