"""The sdist and the wheels, built by ``uv build``, and what is in them."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BELOW_RJAX = ("models", "pallas_kernels")  # by links in ``rjax/``


@dataclasses.dataclass(frozen=True)
class Distributions:
    """Paths of an sdist, and of the wheel that was built from it."""

    sdist: Path
    wheel: Path


def run_uv(*arguments: str | Path) -> None:
    """Run ``uv``.

    Raises:
        AssertionError: the exit status is not 0; the message is what it wrote to stderr.
    """
    done = subprocess.run([sys.executable, "-m", "uv", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def build(out: Path) -> Distributions:
    """Build the sdist of the checkout in ``out``, and from the sdist the wheel."""
    run_uv("build", "--out-dir", out, ROOT)
    (sdist,) = out.glob("*.tar.gz")
    return Distributions(sdist, _wheel_in(out))


def build_wheel(source: Path, out: Path) -> Path:
    """Build the wheel of a source folder in ``out``, as ``pip install`` of the folder does."""
    run_uv("build", "--wheel", "--out-dir", out, source)
    return _wheel_in(out)


def wheel_files(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel by their names."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        assert len(names) == len(set(names))
        return {name: opened.read(name) for name in names}


def sdist_members(sdist: Path) -> list[tarfile.TarInfo]:
    """What an sdist holds, without the name of its top folder."""
    with tarfile.open(sdist) as opened:
        members = opened.getmembers()
    for member in members:
        member.name = member.name.partition("/")[2]
    return members


def package_files() -> dict[str, bytes]:
    """The files of the checkout that are part of the package, by their names in the wheel."""
    found = {}
    for top in ("rjax", *BELOW_RJAX):
        for path in (ROOT / top).rglob("*"):  # does not follow the links
            if path.is_file() and "__pycache__" not in path.parts:
                name = path.relative_to(ROOT).as_posix()
                found[f"rjax/{name}" if top in BELOW_RJAX else name] = path.read_bytes()
    return found


def differences(files: dict[str, bytes], others: dict[str, bytes]) -> list[str]:
    """Names that only one of two has, or that differ in their bytes."""
    names = files.keys() | others.keys()
    return sorted(name for name in names if files.get(name) != others.get(name))


def download_without_links(folder: Path) -> Path:
    """The checkout as ``git archive`` packs it, unpacked by a tool that writes links as text.

    Changes that are not committed are part of it. The repository gains no object.
    """
    archive = folder / "download.zip"
    index, objects = folder / "index", folder / "objects"
    shutil.copy(_git_path("index"), index)
    objects.mkdir()
    own = {
        "GIT_INDEX_FILE": str(index),
        "GIT_OBJECT_DIRECTORY": str(objects),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": _git_path("objects"),
    }
    _git("add", "--all", **own)
    _git("archive", "--format=zip", f"--output={archive}", _git("write-tree", **own), **own)
    unpacked = folder / "download"
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(unpacked)
    return unpacked


def docker_context(folder: Path) -> Path:
    """What ``deploy/Dockerfile`` copies into the image; COPY keeps the links inside a folder."""
    context = folder / "image"
    context.mkdir()
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.+)$", dockerfile, flags=re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            if (ROOT / source).is_file():
                shutil.copy(ROOT / source, context / target)
            else:
                shutil.copytree(ROOT / source, context / target, symlinks=True)
    return context


def _wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def _git_path(name: str) -> str:
    return _git("rev-parse", "--path-format=absolute", "--git-path", name)


def _git(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
