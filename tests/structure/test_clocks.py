"""Durations, deadlines and limits are measured with the monotonic clock: an adjustment of the wall
clock changes none of them."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALL = {
    "time": {"time", "time_ns", "ctime", "gmtime", "localtime", "strftime"},
    "datetime": {"date", "datetime"},
}
ALLOWED = {
    "rjax/benchmarks/records.py": "date of a record",
    "rjax/benchmarks/serve_report.py": "date of a report",
    "rjax/engine/kv_events/publisher.py": "timestamp of an event, as in vLLM",
    "rjax/commands/serve/command.py": "created",
    "rjax/serve/api/chat_parts.py": "created",
    "rjax/serve/api/completions.py": "created",
    "rjax/serve/api/prefixes.py": "created",
    "rjax/serve/api/responses/respond.py": "created_at",
    "rjax/serve/api/responses/writer.py": "completed_at",
    "rjax/serve/http/starting_app.py": "created",
    "rjax/serve/loading/service_builder.py": "created",
}
"""Files that read the wall clock, and the moment that they report with it."""


def reads_wall_clock(source: str) -> bool:
    """Whether a file uses a function of the wall clock, imported in either way."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in WALL:
            if WALL[node.module] & {alias.name for alias in node.names}:
                return True
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.attr in WALL.get(node.value.id, ())
        ):
            return True
    return False


def test_only_moments_that_are_reported_are_of_the_wall_clock():
    found = {
        str(path.relative_to(ROOT))
        for layer in ("rjax", "models", "pallas_kernels")
        for path in (ROOT / layer).rglob("*.py")
        if reads_wall_clock(path.read_text())
    }
    assert found == set(ALLOWED), "use time.monotonic for durations, deadlines and limits"


def test_every_form_of_reading_it_is_seen():
    assert reads_wall_clock("import time\ntime.time()")
    assert reads_wall_clock("from time import time")
    assert reads_wall_clock("import datetime\ndatetime.datetime.now()")
    assert not reads_wall_clock("import time\ntime.monotonic()")
