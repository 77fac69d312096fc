"""Benchmarks; each is a module or a package that can be run."""

from pathlib import Path

ROOT: Path = Path(__file__).parents[1]
"""Folder of the checkout."""
RESULTS: Path = Path(__file__).parent / "results"
"""Folder of the recorded results."""
