"""Programs compiled side by side are the ones that calls then run."""

import jax
import jax.numpy as jnp
import pytest

from rjax.worker.compile_ahead import compile_ahead


@pytest.fixture
def compilations():
    found = []

    def listen(event: str, duration_secs: float, **_) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_calls_find_what_was_compiled(compilations, capsys):
    run = jax.jit(lambda x: jnp.sin(x) * 3)
    inputs = [jnp.zeros(n) for n in (3, 4, 5)]
    compilations.clear()
    compile_ahead((run.lower(x) for x in inputs), 3, title="Compiling sines", progress=True)
    assert len(compilations) == 3
    assert run(inputs[1]).shape == (4,)
    assert len(compilations) == 3
    assert "Compiling sines: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("failures", [1, 2])
def test_what_fails_beside_others_is_tried_alone(failures, monkeypatch):
    run = jax.jit(lambda x: x + 1)
    programs = [run.lower(jnp.zeros(n)) for n in (3, 4, 5)]
    tried, compile_it = [], jax.stages.Lowered.compile

    def scarce(program):
        tried.append(program)
        if program is programs[1] and tried.count(program) <= failures:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return compile_it(program)

    monkeypatch.setattr(jax.stages.Lowered, "compile", scarce)
    if failures > 1:
        with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
            compile_ahead(programs, 3, title="x", progress=False)
    else:
        compile_ahead(programs, 3, title="x", progress=False)
    assert tried.count(programs[1]) == 2
    assert tried[-1] is programs[1]
