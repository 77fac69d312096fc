"""The check of NCCL before an engine starts on several GPUs."""

from types import SimpleNamespace

import jax
import pytest

from rjax.errors import InvalidConfigError
from rjax.worker.nccl import check_nccl


def library(version: int, **functions):
    def get_version(found):
        found._obj.value = version

    return SimpleNamespace(ncclGetVersion=get_version, **functions)


def test_an_old_nccl_is_named(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    names = []

    def load(name):
        names.append(name)
        return library(22809)

    with pytest.raises(InvalidConfigError, match=r"NCCL is 2\.28\.9; .* needs 2\.29\.2 or"):
        check_nccl(load)
    assert names == ["libnccl.so.2"]
    check_nccl(lambda _: library(23203, ncclGetPeerDevicePointer=print))


def test_what_cannot_be_found_is_left_to_xla(monkeypatch):
    def missing(_):
        raise OSError

    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    check_nccl(missing)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    check_nccl(lambda _: library(22809))
