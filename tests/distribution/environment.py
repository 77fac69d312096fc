"""Environments outside the repository, made by uv."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .distributions import ROOT, run_uv

NEWEST_PYTHON = "3.13"
"""The newest version of Python that rjax says it runs on."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment in a folder."""

    folder: Path

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.folder / "bin" / "python"

    @property
    def command(self) -> Path:
        """The console script ``rjax``."""
        return self.folder / "bin" / "rjax"

    @property
    def site_packages(self) -> Path:
        """Where packages are installed."""
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def make(self, python: str = sys.executable) -> None:
        """Make it, without packages.

        Args:
            python: an interpreter's path.
        """
        run_uv("venv", "--python", python, self.folder)

    def copy(self, folder: Path) -> "Environment":
        """An environment with the same packages, of hard links."""
        shutil.copytree(self.folder, folder, symlinks=True, copy_function=os.link)
        return Environment(folder)

    def install(self, *requirement: str, locked: bool = True) -> None:
        """Install rjax and what it needs.

        Args:
            requirement: of rjax, as ``pip install`` takes it. A rjax that is there is replaced.
            locked: with the versions of ``requirements.lock``; else with the newest.
        """
        lock = ("-c", ROOT / "requirements.lock") if locked else ()
        run_uv("pip", "install", "--python", self.python, *lock, *requirement)
        run_uv("cache", "clean", "rjax")  # no later run can use this build

    def install_lowest(self, wheel: Path, extra: str) -> None:
        """Install a wheel of rjax with the lowest versions that ``pyproject.toml`` allows."""
        declared = ("-r", ROOT / "pyproject.toml", "--extra", extra)
        lowest = ("--resolution", "lowest-direct", *declared)
        run_uv("pip", "install", "--python", self.python, *lowest)
        run_uv("pip", "install", "--python", self.python, "--no-deps", wheel)
        run_uv("cache", "clean", "rjax")


def find_python(version: str) -> str | None:
    """The path of an interpreter of this version on this machine; None without one."""
    find = (sys.executable, "-m", "uv", "python", "find", "--no-python-downloads", version)
    pyenv = {"PYENV_VERSION": version}  # which otherwise offers the version of the checkout alone
    found = subprocess.run(find, env=os.environ | pyenv, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else None
