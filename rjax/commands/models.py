"""The command ``rjax models``: the supported model families, from their registry."""

import argparse
import json
from collections.abc import Sequence

from rjax.cli.errors import parse_and_run
from rjax.cli.parser import OneLineParser

_NAME = "rjax models"
_NOTES = """\
A model is a Hugging Face folder or hub id with safetensors weights and config.json; its
"architectures" name the family. Architectures for conditional generation also take images; their
text alone is served. A setting of config.json that is not supported is refused with the reason.
Weights: {schemes}."""


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = OneLineParser(
        prog=_NAME, description="List the supported model families.", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return parse_and_run(_NAME, build_parser(), argv, _list)


def _list(arguments: argparse.Namespace) -> int:
    from rjax.models.families import FAMILIES
    from rjax.models.formats import format_names

    families = [(family.models, family.architecture) for family in FAMILIES.values()]
    schemes = ["unquantised", *format_names()]
    if arguments.json:
        listed = [{"architecture": name, "models": models} for models, name in families]
        print(json.dumps({"families": listed, "weights": schemes}))
        return 0
    width = max(len(models) for models, _ in families)
    for models, architecture in [("models", "architecture"), *families]:
        print(f"{models:{width}}  {architecture}")
    print("\n" + _NOTES.format(schemes=", ".join(schemes)))
    return 0
