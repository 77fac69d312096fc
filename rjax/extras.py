"""How to install what an extra of rjax needs. No package index has rjax."""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname


def install_command(extra: str) -> str:
    """The command that adds an extra to this environment, from where rjax itself was installed."""
    origin = _origin()
    url = origin.get("url")
    if url is None:
        return f"pip install -e '.[{extra}]' in a clone of the repository"
    if origin.get("dir_info", {}).get("editable"):
        folder = url2pathname(urlsplit(url).path)
        return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install {shlex.quote(f'rjax[{extra}] @ {url}')}"


def _origin() -> dict[str, Any]:
    """What the installer noted, as in PEP 610; empty where rjax is only on the import path."""
    try:
        return json.loads(distribution("rjax").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return {}
