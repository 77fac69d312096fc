"""One build and one installation for all tests of the packages."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .distributions import Distributions, build
from .environment import NEWEST_PYTHON, Environment, find_python
from .user_folder import UserFolder


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The sdist of the checkout, and the wheel built from it."""
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def wheel_environment(
    built: Distributions, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    """An environment with the wheel and what ``rjax[serve]`` needs."""
    made = Environment(tmp_path_factory.mktemp("wheel") / "environment")
    made.make()
    made.install(f"rjax[serve] @ {built.wheel.as_uri()}")
    yield made
    shutil.rmtree(made.folder)  # pytest keeps the folders of three runs


@pytest.fixture(scope="session", params=["locked", "lowest", "newest"])
def environment(
    request: pytest.FixtureRequest, built: Distributions, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    """`wheel_environment`, one with the lowest versions of what rjax declares, and one of the
    newest Python with the newest versions."""
    if request.param == "locked":
        yield request.getfixturevalue("wheel_environment")
        return
    made = Environment(tmp_path_factory.mktemp(request.param) / "environment")
    if request.param == "lowest":
        made.make()
        made.install_lowest(built.wheel, "serve")
    else:
        python = find_python(NEWEST_PYTHON)
        if python is None:
            pytest.skip(f"there is no Python {NEWEST_PYTHON}")
        made.make(python)
        made.install(f"rjax[serve] @ {built.wheel.as_uri()}", locked=False)
    yield made
    shutil.rmtree(made.folder)


@pytest.fixture(scope="session")
def user(tmp_path_factory: pytest.TempPathFactory) -> UserFolder:
    """A user's folder outside the repository."""
    top: Path = tmp_path_factory.mktemp("user")
    folder = UserFolder(top / "project", top / "home")
    folder.write()
    return folder
