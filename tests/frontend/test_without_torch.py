"""A command loads its tokenizer without PyTorch, even where that is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

_FAKE = "raise AssertionError('imported')\n"
_SCRIPT = """
from rjax.tokenization.without_torch import leave_torch_out
leave_torch_out()
from rjax.models import BUNDLED_MODEL
from rjax.tokenization import Tokenizer
print(Tokenizer(BUNDLED_MODEL).hf.decode(Tokenizer(BUNDLED_MODEL).hf("Peru").input_ids[1:]))
"""


@pytest.mark.thorough
def test_a_tokenizer_needs_no_torch(tmp_path: Path) -> None:
    package, version = tmp_path / "torch", tmp_path / "torch-2.11.0.dist-info"
    package.mkdir()
    version.mkdir()
    (package / "__init__.py").write_text(_FAKE)
    (version / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Peru"
