"""The command that adds an extra, for each way in which rjax can be there."""

import importlib.metadata
import json
from types import SimpleNamespace
from typing import Any

import pytest

from rjax import extras
from rjax.extras import install_command


@pytest.fixture
def origin(monkeypatch: pytest.MonkeyPatch):
    """Says what the installer noted; None for an rjax that was not installed."""

    def note(found: dict[str, Any] | None) -> None:
        def distribution(name: str) -> Any:
            assert name == "rjax"
            if found is None:
                raise importlib.metadata.PackageNotFoundError
            text = json.dumps(found) if found else None
            return SimpleNamespace(read_text={"direct_url.json": text}.__getitem__)

        monkeypatch.setattr(extras, "distribution", distribution)

    return note


@pytest.mark.parametrize(
    ("found", "command"),
    [
        (
            {"url": "file:///my%20code/rjax", "dir_info": {"editable": True}},
            "pip install -e '/my code/rjax[serve]'",
        ),
        (
            {"url": "file:///code/rjax", "dir_info": {}},
            "pip install 'rjax[serve] @ file:///code/rjax'",
        ),
        (
            {"url": "file:///rjax-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'rjax[serve] @ file:///rjax-0.1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://host/rjax.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}},
            "pip install 'rjax[serve] @ git+https://host/rjax.git@0a1b'",
        ),
        ({}, "pip install -e '.[serve]' in a clone of the repository"),
        (None, "pip install -e '.[serve]' in a clone of the repository"),
    ],
)
def test_it_names_where_rjax_came_from(origin, found, command):
    origin(found)
    assert install_command("serve") == command
