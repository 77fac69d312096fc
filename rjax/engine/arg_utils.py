"""EngineArgs and AsyncEngineArgs: the engine's options as one object, under vLLM's names."""

import argparse
import dataclasses
from typing import Any

from rjax.cli.arguments import add_engine_arguments, given_engine_options
from rjax.config import EngineConfig
from rjax.config.option_docs import engine_options, with_engine_options
from rjax.config.quantization_names import check_quantization
from rjax.vllm.options import own_options


def _defaults() -> Any:
    """A dataclass with a field for each option."""

    def copied(field: "dataclasses.Field[object]") -> Any:
        made: Any = dataclasses.field
        return made(default=field.default, default_factory=field.default_factory, repr=field.repr)

    fields = [(name, field.type, copied(field)) for name, field in engine_options().items()]
    return dataclasses.make_dataclass("_Defaults", fields, eq=False)


_Defaults = _defaults()


@with_engine_options
class EngineArgs(_Defaults):
    """The options of an engine, each an attribute. `rjax.LLM.from_engine_args` takes them, and
    ``LLM(**dataclasses.asdict(args))``.

    Args:
        {options}

    Raises:
        InvalidConfigError: an unknown option or a value out of range.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        own = own_options({"model": model, **options}, engine_options())
        check_quantization(EngineConfig.from_options(own).model.quantization)
        super().__init__(**own)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every option; those that are not given leave no attribute."""
        add_engine_arguments(parser)
        return parser

    @classmethod
    def from_cli_args[A: "EngineArgs"](cls: type[A], args: argparse.Namespace) -> A:
        """The options that were given on a command line."""
        return cls(**given_engine_options(args))


class AsyncEngineArgs(EngineArgs):
    """The same options, for `rjax.AsyncLLM`."""
