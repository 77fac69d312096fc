"""Annotations are checked at run time: by beartype, and where arrays have axes by jaxtyping too."""

import dataclasses
import inspect
import typing
from typing import Any

import beartype
import jaxtyping

# PEP 484's tower lets a whole number stand for a float.
_check_types = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
_check_axes = jaxtyping.jaxtyped(typechecker=_check_types)


def install() -> None:
    """Check the functions and dataclasses of rjax; to be called before it is imported."""
    jaxtyping.jaxtyped = _jaxtyped
    jaxtyping.install_import_hook(["rjax"], None)


def _jaxtyped(*, typechecker: None) -> Any:
    """The decorator that jaxtyping's hook gives every function and class."""
    del typechecker
    return _checked


def _checked(of: Any) -> Any:
    """A class or function whose arguments and results are checked.

    A function inside a function is no boundary, and would be wrapped each time the outer one runs.
    A call takes several times as long under jaxtyping, which keeps the sizes of axes.
    """
    if inspect.isclass(of):
        if dataclasses.is_dataclass(of) and "__init__" in vars(of):
            of.__init__ = _checked_function(of.__init__)
        return of
    return of if "<locals>" in of.__qualname__ else _checked_function(of)


def _checked_function(of: Any) -> Any:
    return (_check_axes if any(map(_has_axes, of.__annotations__.values())) else _check_types)(of)


def _has_axes(annotation: Any) -> bool:
    """Whether an array of jaxtyping occurs in an annotation, or may occur because it is text."""
    if isinstance(annotation, str):  # beartype alone takes no name of a stub file
        return True
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    if isinstance(annotation, typing.TypeAliasType):
        return _has_axes(annotation.__value__)
    return any(map(_has_axes, typing.get_args(annotation)))
