"""What is in the sdist and in the wheel, and that each source gives the same wheel."""

import email
import email.message
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rjax
from rjax.serve.page.files import PAGE_PATHS, page_file

from .distributions import (
    BELOW_RJAX,
    ROOT,
    Distributions,
    build_wheel,
    differences,
    docker_context,
    download_without_links,
    package_files,
    sdist_members,
    wheel_files,
)
from .environment import Environment

pytestmark = pytest.mark.thorough

DIST_INFO = f"rjax-{rjax.__version__}.dist-info"
MOST_MEGABYTES = 40  # installed, without dependencies: 34 of them are the bundled model


@pytest.fixture(scope="module")
def files(built: Distributions) -> dict[str, bytes]:
    """The files of the wheel by their names."""
    return wheel_files(built.wheel)


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_wheel_has_the_package_and_nothing_else(files: dict[str, bytes]):
    assert {name.split("/")[0] for name in files} == {"rjax", DIST_INFO}
    package = {name: content for name, content in files.items() if name.startswith("rjax/")}
    assert not differences(package, package_files())


def test_the_wheel_has_what_is_not_python(files: dict[str, bytes]):
    assert "rjax/py.typed" in files
    shards = [n for n in files if n.startswith("rjax/models/tables/checkpoint/")]
    assert len([n for n in shards if n.endswith(".safetensors")]) == 4
    assert {Path(n).name for n in shards} > {"config.json", "tokenizer.json"}
    assert "rjax/models/tables/demo.json" in files
    page = [c for n, c in files.items() if n.startswith("rjax/serve/page/static/")]
    assert sorted(page) == sorted(page_file(path)[0] for path in PAGE_PATHS)


def test_the_sdist_has_each_file_once(built: Distributions):
    members = sdist_members(built.sdist)
    names = [member.name for member in members]
    assert len(names) == len(set(names))
    assert all(member.isfile() for member in members)  # no links
    tops = {"rjax", "docs", "README.md", "LICENSE", *BELOW_RJAX}
    tops |= {"pyproject.toml", "PKG-INFO", ".gitignore"}
    assert {name.split("/")[0] for name in names} == tops
    below = tuple(f"rjax/{name}" for name in BELOW_RJAX)
    package = {n.removeprefix("rjax/") if n.startswith(below) else n for n in package_files()}
    assert package == {n for n in names if n.split("/")[0] in ("rjax", *BELOW_RJAX)}


def test_each_source_gives_the_wheel_of_the_sdist(files: dict[str, bytes], tmp_path: Path):
    """The checkout has the links, a download may have text files instead, Docker copies some."""
    download, image = download_without_links(tmp_path), docker_context(tmp_path)
    for name in BELOW_RJAX:
        assert (download / "rjax" / name).read_text() == f"../{name}"
        assert (image / "rjax" / name).is_symlink()
    sources = (ROOT, download, image)
    with ThreadPoolExecutor() as pool:
        wheels = list(
            pool.map(build_wheel, sources, [tmp_path / "dist" / str(i) for i in range(3)])
        )
    for source, wheel in zip(sources, wheels, strict=True):
        assert not differences(wheel_files(wheel), files), source


def test_the_metadata(files: dict[str, bytes]):
    found: email.message.Message = email.message_from_bytes(files[f"{DIST_INFO}/METADATA"])
    declared = project()
    assert (found["Name"], found["Version"]) == ("rjax", rjax.__version__)
    assert found["Summary"] == declared["description"]
    assert found["Requires-Python"] == declared["requires-python"]
    assert found["License-Expression"] == declared["license"]
    assert found["License-File"] == "LICENSE"
    assert f"{DIST_INFO}/licenses/LICENSE" in files
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(found.get_all("Classifier", [])) == set(declared["classifiers"])
    assert "Typing :: Typed" in declared["classifiers"]
    extras = declared["optional-dependencies"]
    assert set(found.get_all("Provides-Extra", [])) == set(extras)
    needed = found.get_all("Requires-Dist", [])
    assert len([line for line in needed if "extra ==" not in line]) == len(declared["dependencies"])
    assert len([line for line in needed if "extra ==" in line]) >= len(extras)
    points = files[f"{DIST_INFO}/entry_points.txt"].decode()
    assert points.split() == ["[console_scripts]", "rjax", "=", declared["scripts"]["rjax"]]


def test_the_installed_size(
    files: dict[str, bytes], wheel_environment: Environment, capsys: pytest.CaptureFixture
):
    own = sum(map(len, files.values())) / 1e6
    packages = wheel_environment.site_packages.rglob("*")
    everything = sum(
        path.lstat().st_size
        for path in packages
        if path.is_file() and path.parent.name != "__pycache__"
    )
    with capsys.disabled():
        print(f"\ninstalled: rjax {own:.1f} MB, with dependencies {everything / 1e6:.0f} MB")
    assert own < MOST_MEGABYTES
