"""A folder with a user's script beside modules of the user's own, named like folders of ours."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

from bench.train_bundled_model.make_demo import demo_table
from bench.train_bundled_model.table import Table, system_prompt
from tests.bundled import BUNDLED_SIZES

MODULES = ("models", "pallas_kernels", "bench", "tests")

_MODULE = '''\
"""Of the user: whatever is not in this folder must not import it."""

import sys
from pathlib import Path

frame = sys._getframe(1)
while frame is not None:
    file = frame.f_code.co_filename
    if not file.startswith("<frozen ") and Path(file).resolve().parent != Path(__file__).parent:
        raise ImportError(f"{file} imports the user's own {__name__}")
    frame = frame.f_back
'''

_SCRIPT = """\
import json
import sys

import bench
import models
import pallas_kernels
import tests

import rjax
from rjax import LLM, SamplingParams
from rjax.models import BUNDLED_MODEL

conversation, options = json.loads(sys.argv[1])
with LLM(str(BUNDLED_MODEL), **options) as llm:
    (output,) = llm.chat([conversation], SamplingParams(temperature=0, max_tokens=64))
own = {module.__name__: module.__file__ for module in (bench, models, pallas_kernels, tests)}
print(json.dumps({"rjax": rjax.__file__, "own": own, "answer": output.outputs[0].text}))
"""

_TABLE = demo_table()
_PERSON = dict(zip(_TABLE.columns, _TABLE.rows[3], strict=True))
SYSTEM_PROMPT = system_prompt(Table(_TABLE.columns, _TABLE.rows[:6]))
QUESTION = f"Where does {_PERSON['name']} live?"
ANSWER = f"The country of {_PERSON['name']} is {_PERSON['country']}."
CONVERSATION = [
    {"role": "system", "content": SYSTEM_PROMPT},
    {"role": "user", "content": QUESTION},
]


@dataclasses.dataclass(frozen=True)
class UserFolder:
    """The folder, and the home of a user who has nothing else.

    Attributes:
        path: of the folder.
        home: has the compiled programs, which all runs share.
    """

    path: Path
    home: Path

    def write(self) -> None:
        """Write the script and the modules."""
        self.path.mkdir()
        self.home.mkdir()
        (self.path / "ask.py").write_text(_SCRIPT)
        for name in MODULES:
            (self.path / f"{name}.py").write_text(_MODULE)

    def environment(self, **more: str) -> dict[str, str]:
        """Environment variables of the user's programs; no model can be downloaded."""
        own = {"PATH": os.environ["PATH"], "HOME": str(self.home), "HF_HUB_OFFLINE": "1"}
        return own | more

    def run(self, *command: str | Path, **more: str) -> str:
        """What a command prints, run in the folder.

        Args:
            command: a program and its arguments.
            more: environment variables.

        Raises:
            AssertionError: the exit status is not 0; the message is what it wrote to stderr.
        """
        done = subprocess.run(
            command,
            cwd=self.path,
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run_script(self, python: Path, **more: str) -> Path:
        """Run the script, check its answer and its imports, and return the folder of its rjax."""
        argument = json.dumps([CONVERSATION, {**BUNDLED_SIZES, "use_tqdm": False}])
        out = self.run(python, "ask.py", argument, **more)
        found = json.loads(out.splitlines()[-1])
        assert found["answer"] == ANSWER
        assert found["own"] == {name: str(self.path / f"{name}.py") for name in MODULES}
        return Path(found["rjax"]).parent
