"""Environments outside the repository, made by uv."""

import dataclasses
import os
import shutil
import sys
from pathlib import Path

from .distributions import ROOT, run_uv


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

    def make(self) -> None:
        """Make it, without packages."""
        run_uv("venv", "--python", sys.executable, self.folder)

    def copy(self, folder: Path) -> "Environment":
        """An environment with the same packages, of hard links."""
        shutil.copytree(self.folder, folder, symlinks=True, copy_function=os.link)
        return Environment(folder)

    def install(self, *requirement: str) -> None:
        """Install rjax and what it needs, with the versions of ``requirements.lock``.

        Args:
            requirement: of rjax, as ``pip install`` takes it. A rjax that is there is replaced.
        """
        lock = ROOT / "requirements.lock"
        run_uv("pip", "install", "--python", self.python, "-c", lock, *requirement)
        run_uv("cache", "clean", "rjax")  # no later run can use this build
