"""Benchmarks; each is a module that can be run."""

from pathlib import Path

RESULTS: Path = Path(__file__).parent / "results"
"""Folder of the recorded results."""
