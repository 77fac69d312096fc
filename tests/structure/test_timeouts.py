"""Requests of tests wait longer than the 5 seconds that httpx2 has by default: the machine may be
busy, and the server may compile."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
ASKING = {
    *("get", "post", "put", "patch", "delete", "head", "options", "request", "stream"),
    *("Client", "AsyncClient"),
}


def without_timeout(source: str) -> list[int]:
    """Lines of the calls of httpx2 that leave the timeout to it. ``**options`` may have one."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in ASKING) == ("httpx2", True)
        and not {"timeout", None} & {keyword.arg for keyword in node.keywords}
    ]


def test_requests_of_tests_say_how_long_they_wait():
    found = {
        f"{path.relative_to(TESTS)}:{line}"
        for path in TESTS.rglob("*.py")
        for line in without_timeout(path.read_text())
    }
    assert not found, "give a timeout, such as timeout=60; httpx2's own are 5 seconds"


def test_calls_without_a_timeout_are_seen():
    assert without_timeout("import httpx2\nhttpx2.get(url)\nhttpx2.Client()") == [2, 3]
    assert not without_timeout(
        "httpx2.get(url, timeout=60)\nhttpx2.get(url, **more)\nclient.get(url)"
    )
