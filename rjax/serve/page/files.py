"""The files of the page and their paths on the server."""

import functools
from importlib import resources

_MODULES = (
    *("api", "chat", "event_stream", "graph", "main", "markdown", "marked", "metrics", "monitor"),
    "start",
)
_FILES = {
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
} | {f"/page/{name}.js": (f"{name}.js", "text/javascript") for name in _MODULES}

PAGE_PATHS = frozenset(_FILES)
"""Routes of the page. They need no API key, because a browser sends none for a page; the files are
the same on every server."""


@functools.cache
def page_file(path: str) -> tuple[bytes, str]:
    """The content and the media type of a file of the page.

    Args:
        path: one of `PAGE_PATHS`.
    """
    name, media_type = _FILES[path]
    folder = resources.files(__package__) / "static"
    return (folder / name).read_bytes(), media_type
