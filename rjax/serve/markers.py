"""Markers in a text that comes in piece by piece."""


def partial_marker(text: str, *markers: str) -> int:
    """Characters at the end of a text that begin a marker and are not a whole one."""
    most = max(map(len, markers)) - 1
    for size in range(min(len(text), most), 0, -1):
        end = text[-size:]
        if any(len(marker) > size and marker.startswith(end) for marker in markers):
            return size
    return 0
