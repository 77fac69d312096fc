"""Options for reverse proxies and browsers (CORS)."""

import dataclasses
import functools
import ipaddress
import json
import re
from typing import Any

from rjax.errors import InvalidConfigError
from rjax.serve.page.files import PAGE_PATHS

HEALTH_PATHS = frozenset(("/health", "/ping"))
"""Routes that need no API key and are exempt from the connection limits."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@?#]+|null")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\*")
_ROOT = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)+")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # a method's or a header's name


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Options of the app.

    Attributes:
        root_path: path at which a reverse proxy serves this server, such as ``/llm``; requests may
            contain it or not.
        allowed_origins: origins of web pages that may use the server (CORS); "*" is all.
        allowed_methods: methods of their requests.
        allowed_headers: headers of their requests.
        allow_credentials: whether their requests may have cookies.
        allowed_hosts: names of this server in the header ``Host`` of requests; "*" is all, and None
            does not look. ``localhost`` and addresses are always allowed: a web page can reach a
            server of its visitor's machine only through a name (DNS rebinding).
        tokenizer_info: whether GET /tokenizer_info is enabled.
        request_id_headers: whether responses have the header ``X-Request-Id``.

    Raises:
        InvalidConfigError: a path, an origin or a name is invalid, or CORS options are set without
            origins.
    """

    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    allowed_hosts: tuple[str, ...] | None = None
    tokenizer_info: bool = False
    request_id_headers: bool = False

    def __post_init__(self) -> None:
        if self.root_path and not _ROOT.fullmatch(self.root_path):
            raise InvalidConfigError(
                f"--root-path is {self.root_path!r}; give a path such as /llm, with a slash at its "
                "beginning and none at its end"
            )
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InvalidConfigError(
                    f"--allowed-origins holds {origin!r}; give origins such as "
                    "https://example.com, without a path, or *"
                )
        for host in self.allowed_hosts or ():
            if not _HOST.fullmatch(host):
                raise InvalidConfigError(
                    f"--allowed-hosts holds {host!r}; give names such as llm.example.com, without "
                    "a port, or *"
                )
        for flag, names in (
            ("--allowed-methods", self.allowed_methods),
            ("--allowed-headers", self.allowed_headers),
        ):
            for name in names:
                if not _TOKEN.fullmatch(name):
                    raise InvalidConfigError(f"{flag} holds {name!r}; give names, or *")
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        if not self.allowed_origins:
            for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
                if getattr(self, name) != fields[name]:
                    flag = "--" + name.replace("_", "-")
                    raise InvalidConfigError(
                        f"{flag} does nothing without --allowed-origins; give the origins too"
                    )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise InvalidConfigError(
                "--allow-credentials with the origin * would let every web page act for its "
                "visitors; name the origins"
            )

    @functools.cached_property
    def health_paths(self) -> frozenset[str]:
        """`HEALTH_PATHS`, with and without the root path."""
        return HEALTH_PATHS | {self.root_path + path for path in HEALTH_PATHS}

    @functools.cached_property
    def page_paths(self) -> frozenset[str]:
        """`PAGE_PATHS`, with and without the root path."""
        return PAGE_PATHS | {self.root_path + path for path in PAGE_PATHS}

    def allows_host(self, header: str) -> bool:
        """Whether a request with this header ``Host`` is answered."""
        if self.allowed_hosts is None or "*" in self.allowed_hosts:
            return True
        if header.startswith("["):
            name = header[1:].partition("]")[0]
        else:
            name = header.partition(":")[0].lower().removesuffix(".")
        if name == "localhost" or name in map(str.lower, self.allowed_hosts):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    @property
    def cors(self) -> dict[str, Any]:
        """Arguments of starlette's ``CORSMiddleware``."""
        return {
            "allow_origins": self.allowed_origins,
            "allow_methods": self.allowed_methods,
            "allow_headers": self.allowed_headers,
            "allow_credentials": self.allow_credentials,
        }


def json_names(flag: str, text: str) -> tuple[str, ...]:
    """Parse a JSON list of strings from the command line, as in vLLM.

    Raises:
        InvalidConfigError: the text is not a JSON list of strings.
    """
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise InvalidConfigError(
            f"{flag} is {text!r}; give a JSON list of texts, such as '[\"*\"]'"
        )
    return tuple(found)
