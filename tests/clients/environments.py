"""Environments of common clients, apart from this repository's: one folder for each client.

    python -m tests.clients.environments          # the light clients
    python -m tests.clients.environments guidellm lm-eval

An environment that is there already and has the pinned versions is left as it is.
"""

import argparse
import dataclasses
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".clients"
REQUIREMENTS = Path(__file__).parent / "requirements"
SCRIPTS = Path(__file__).parent / "scripts"
_STAMP = "installed.txt"
_STUBS = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Client:
    """A client in an environment of its own.

    Attributes:
        name: of the package, of its file of pinned versions, and of its environment's folder.
        script: in ``scripts``, what the client does.
        light: installed in seconds, without torch.
        torch: imports torch and not rjax. Such a client runs on Python 3.11 and is installed by
            pip, so that pip's own settings say where torch's CPU build is found; others on this
            Python, by uv.
        seconds: for its script, on a machine of 2 cores.
        is_library: runs rjax in its own process, from this checkout; its pinned versions include
            what rjax needs.
        pins_all: is installed without dependencies other than the pinned ones, since those that it
            declares include torch.
        stub: folder of a package to install besides, which stands for one that the client imports;
            relative to this file's.
    """

    name: str
    script: str
    light: bool = False
    torch: bool = False
    seconds: float = 300.0
    is_library: bool = False
    pins_all: bool = False
    stub: str | None = None

    @property
    def folder(self) -> Path:
        """Of the environment."""
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        """Of the environment."""
        return self.folder / "bin" / "python"

    @property
    def requirements(self) -> Path:
        """Its pinned versions."""
        return REQUIREMENTS / f"{self.name}.txt"

    def installed(self) -> bool:
        """Whether the environment has the pinned versions."""
        stamp = self.folder / _STAMP
        return stamp.exists() and stamp.read_text() == self._wanted()

    def install(self) -> None:
        """Make the environment.

        Raises:
            subprocess.CalledProcessError: an installer failed; its own message is on stderr.
            FileNotFoundError: there is no Python 3.11 for a client that needs it.
        """
        if self.installed():
            return
        if self.folder.exists():
            shutil.rmtree(self.folder)
        if self.torch:
            self._install_with_pip()
        else:
            uv = (sys.executable, "-m", "uv")
            _run(*uv, "venv", "-q", "--python", sys.executable, str(self.folder))
            _run(*uv, "pip", "install", "-q", "--python", str(self.python), *self._pinned())
        if self.stub is not None:
            with tempfile.TemporaryDirectory() as folder:  # setuptools writes into the sources
                sources = shutil.copytree(_STUBS / self.stub, Path(folder, self.stub))
                self._pip("--no-deps", str(sources))
        (self.folder / _STAMP).write_text(self._wanted())

    def _wanted(self) -> str:
        """The pinned versions, and the contents of the stub."""
        wanted = self.requirements.read_text()
        if self.stub is not None:
            for path in sorted((_STUBS / self.stub).rglob("*.*")):
                wanted += path.read_text() if path.suffix in (".py", ".toml") else ""
        return wanted

    def _install_with_pip(self) -> None:
        python = shutil.which("python3.11")
        if python is None:
            raise FileNotFoundError(f"{self.name} needs python3.11 on the PATH; install it")
        _run(python, "-m", "venv", "--without-pip", str(self.folder))
        self._pip(*self._pinned())

    def _pip(self, *wanted: str) -> None:
        _run(
            *(sys.executable, "-m", "pip", "-q", "--python", str(self.python)),
            *("install", "--no-compile", *wanted),
        )

    def _pinned(self) -> tuple[str, ...]:
        options = ("--no-deps",) if self.pins_all else ()
        return *options, "-r", str(self.requirements)


CLIENTS = {
    client.name: client
    for client in (
        Client("openai", "use_openai.py", light=True),
        Client("pydantic-ai", "use_pydantic_ai.py", light=True),
        Client("instructor", "use_instructor.py", light=True),
        Client("langchain-openai", "use_langchain.py"),
        Client("litellm", "use_litellm.py"),
        Client("lm-eval", "use_lm_eval.py", seconds=900.0),
        Client("guidellm", "use_guidellm.py", torch=True),
    )
}
TRAINERS = {
    client.name: client
    for client in (
        Client("trl", "use_trl.py", torch=True, seconds=600.0, stub="vllm_stub"),
        Client("google-tunix", "use_tunix.py", seconds=600.0, is_library=True),
        Client("skyrl", "use_skyrl.py", seconds=600.0, is_library=True, pins_all=True),
        Client("verl", "use_verl.py", seconds=900.0, is_library=True),
    )
}
"""Clients that give a server new weights."""


def main(arguments: list[str] | None = None) -> int:
    """Make the environments that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.environments")
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join(CLIENTS | TRAINERS)} (default: light ones)"
    )
    names = parser.parse_args(arguments).names
    clients = CLIENTS | TRAINERS
    unknown = [name for name in names if name not in clients]
    if unknown:
        parser.error(f"unknown clients {', '.join(unknown)}; choose of {', '.join(clients)}")
    for client in clients.values():
        if client.name in names or (not names and client.light):
            client.install()
            print(f"{client.name}: {client.folder}")
    return 0


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
