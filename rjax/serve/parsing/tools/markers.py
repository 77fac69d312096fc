"""Markers at the boundary of streamed text pieces."""


def partial_marker(text: str, *markers: str) -> int:
    """Length of the longest suffix of a text that is a proper prefix of a marker."""
    for marker in markers:
        if marker[0] in text:
            break
    else:  # as for most pieces of a text
        return 0
    most = max(map(len, markers)) - 1
    for size in range(min(len(text), most), 0, -1):
        end = text[-size:]
        if any(len(marker) > size and marker.startswith(end) for marker in markers):
            return size
    return 0
