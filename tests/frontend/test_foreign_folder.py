"""Nothing in the working folder runs: it may be a downloaded model."""

import subprocess
import sys
from pathlib import Path

import pytest

import rjax

NAMES = (
    "json",
    "msgspec",
    "numpy",
    "jax",
    "transformers",
    "starlette",
    "h11",
    "socket",
)
STARTS = {
    "engine": """
        from rjax.engine_channel.process_channel import ProcessChannel
        options = {"max_model_len": 64, "num_pages": 9, "page_size": 16, "warmup": "off"}
        channel = ProcessChannel("rjax.build.engine_builder:build_engine_from_options", options)
        channel.wait_ready()
        channel.end()
        channel.join(20)
    """,
    "workers": """
        from rjax.models import BUNDLED_MODEL
        from rjax.serve.workers.tasks import TextModel
        from rjax.serve.workers.zygote import Zygote
        zygote = Zygote()
        model = {"folder": str(BUNDLED_MODEL), "chat_template": None, "vocab_size": 2048}
        zygote.fork(TextModel(**model, eos_token_ids=[2]), 2**28)
        zygote.close()
    """,
    "clients": """
        from rjax.benchmarks.stream_client import Address, stream_load_in_processes
        stream_load_in_processes(Address("127.0.0.1", 9), [], 1, lead_seconds=0)
    """,
}


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("what", STARTS)
def test_no_process_imports_from_the_working_folder(what, tmp_path):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})"
        )
    lines = [line.strip() for line in STARTS[what].strip().splitlines()]
    root = str(Path(rjax.__file__).parents[1])
    # As in a checkout that is not installed, with the working folder among those of modules.
    code = "\n".join([f"import sys; sys.path += [{root!r}, {str(tmp_path)!r}]", *lines])
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_what_the_parent_imports_the_child_does_too(tmp_path):
    """A module in another folder than the working folder can be imported."""
    (tmp_path / "a_module.py").write_text("value = 7")
    code = (
        f"import subprocess, sys; sys.path.insert(0, {str(tmp_path)!r});"
        "from rjax.child_python import child_command;"
        "c = child_command('import a_module, sys; print(a_module.value, sys.argv[1:])', 'x');"
        "subprocess.run(c, check=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["7", "['x']"]
