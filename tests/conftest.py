"""Test set-up: annotations of rjax are checked at run time, in tests only."""

import gc
import os
import sys

import hypothesis
import jax
import pytest

from tests import lanes, quick_compilation, type_checks

# Tracing makes millions of objects of which few are garbage; looking for it again and again among
# all that tests have made took a tenth of the time that lowering for CUDA takes.
gc.set_threshold(50_000, 20, 10)

quick_compilation.set_flags()

# Each thread of an interpreted kernel that waits at a barrier holds one of XLA's threads, of which
# there are as many as cores by default: all may wait for a thread of the kernel that cannot start.
os.environ.setdefault("PJRT_NPROC", "16")

# An example may be the first to compile, or meet a busy machine: there are no deadlines.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None)  # --hypothesis-profile thorough
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("quick")

type_checks.install()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before ``-m`` chooses."""
    lanes.assign(items)


def pytest_collection_finish() -> None:
    """Collecting garbage passes over what was imported, which lives as long as the process."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the server's soak lasts, which attacks it draws; whether clients may be missing."""
    parser.addoption(
        "--require-clients",
        action="store_true",
        help="fail where an environment of tests/clients is missing, instead of skipping",
    )
    parser.addoption("--soak-seconds", type=float, default=1200.0, help="of tests/serve/test_soak")
    parser.addoption("--soak-seed", type=int, default=0, help="of tests/serve/test_soak")
    parser.addoption("--soak-attacks", default="", help="names, with commas; default: all")


@pytest.fixture(autouse=True)
def _torch_may_be_looked_for():
    """Commands leave torch out of their process, which is the tests' own; scipy looks for it."""
    yield
    if sys.modules.get("torch", sys) is None:
        del sys.modules["torch"]


@pytest.fixture(scope="module", autouse=True)
def _garbage_of_the_module():
    """Later collections, of which some tests ask for several, pass over what it leaves alive."""
    yield
    if gc.get_count()[1:] != (0, 0):  # a module that made few objects leaves them to the next one
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache(request: pytest.FixtureRequest):
    """Engines of one test run share compiled steps; most of a CPU test's time is compiling."""
    if not hasattr(request.config, "cache"):
        return  # pytest runs without its cache
    folder = request.config.cache.mkdir("jax")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="session", autouse=True)
def _quickly_compiled():
    """On a CPU, LLVM's optimisation takes longer than it gives back. Processes inherit it."""
    on_cpu = jax.default_backend() == "cpu"
    os.environ.pop("PJRT_NPROC", None)  # XLA has read it; processes have no interpreted kernels
    if not on_cpu:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        quick_compilation.optimise(False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_programs_from_disk():
    """Tests put code of their own into programs, which a key does not cover; see `kept`."""
    from rjax.worker import worker  # not before the import hook

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "open_store", lambda identity, mesh: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_fitted_costs(tmp_path_factory):
    """What was fitted on this machine must not decide what tests see."""
    from rjax.worker import cost_model  # not before the import hook

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_model, "FOLDER", str(tmp_path_factory.mktemp("cost_models")))
        yield


@pytest.fixture(scope="module")
def kept():
    """For modules whose programs hold no code of a test: each is compiled once in a test run."""
    from tests.kept_programs import kept_programs  # not before the import hook

    with kept_programs():
        yield


@pytest.fixture(scope="module")
def optimised():
    """For tests whose programs compute for longer than they compile."""
    quick_compilation.optimise(True)
    yield
    quick_compilation.optimise(jax.default_backend() != "cpu")
