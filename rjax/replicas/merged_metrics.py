"""Puts the metrics of several replicas into one exposition of Prometheus' format."""

from collections.abc import Iterable

_HEADS = (b"# HELP ", b"# TYPE ")


def merge_expositions(expositions: Iterable[tuple[str, bytes]]) -> bytes:
    """The metrics of all replicas, each sample with the label ``replica``.

    Args:
        expositions: tag and text of each replica. Every sample has labels already, and no value of
            a label holds a line break, as in `rjax.serve.telemetry.metrics`.
    """
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for tag, text in expositions:
        label = b'{replica="' + tag.encode() + b'",'
        family, own = b"", False
        for line in text.splitlines():
            if line.startswith(_HEADS):
                name = line.split(b" ", 3)[2]
                if name != family:
                    family, own = name, name not in heads
                    heads.setdefault(family, [])
                    samples.setdefault(family, [])
                if own:
                    heads[family].append(line)
            elif line:
                samples[family].append(line.replace(b"{", label, 1))
    lines = [line for family in heads for line in (*heads[family], *samples[family])]
    return b"".join(line + b"\n" for line in lines)
