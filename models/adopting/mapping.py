"""Names of a trainer's arrays, and the names of the checkpoint tensors that they hold.

A mapping is a table, or a function of one name, that gives a `Target`, or several where an array
holds several tensors. In a table, `*` stands for a number, such as that of a layer, in both names:

    {"layers.*.attn.q_proj.w": ("model.layers.*.self_attn.q_proj.weight", "D N H -> (N H) D")}

Checkpoint tensors have the names and the axes ([outputs, inputs]) of Hugging Face's models.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rjax.models.adopting.reading import Reading
from rjax.models.errors import CheckpointError

type Transform = Callable[[Any], Any]
"""Makes the tensor of an array of a trainer, at once."""

type Target = str | tuple[str, str | Reading | Transform | None]
"""The name of a tensor; with it how the array becomes the tensor, unless they are the same."""

type Targets = Target | Sequence[Target] | None
"""One tensor, several, or None for an array that is left out."""

type WeightMapping = Mapping[str, Targets] | Callable[[str], Targets]

type NamedReading = tuple[str, Reading | Transform | None]


def flat_items(weights: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of a tree or of (name, array) items, by names whose parts are joined by dots.

    A tree is a nested mapping, such as ``flax.nnx.State`` or a dictionary, with lists where it has
    numbers. A Flax variable counts as its value.

    Raises:
        CheckpointError: it is neither.
    """
    if isinstance(weights, Mapping):
        yield from _leaves(weights, ())
        return
    if not hasattr(weights, "__iter__") or hasattr(weights, "shape"):
        raise CheckpointError(
            f"the weights are {type(weights).__name__}; give a tree of arrays or (name, array) "
            "pairs"
        )
    for item in weights:
        if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
            raise CheckpointError(
                f"the weights hold {type(item).__name__}; give a tree of arrays or (name, array) "
                "pairs"
            )
        yield item[0], _value(item[1])


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield from _leaves(child, (*path, str(name)))
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _leaves(child, (*path, str(index)))
    elif node is not None:
        yield ".".join(path), _value(node)


def _value(leaf: Any) -> Any:
    """The array of a Flax variable; other objects as they are."""
    return leaf.get_value() if hasattr(leaf, "get_value") else leaf


class NameMap:
    """Finds the tensors that an array holds.

    Args:
        mapping: the `WeightMapping`; None where arrays have the names and axes of tensors.

    Raises:
        CheckpointError: it is no mapping.
    """

    def __init__(self, mapping: Any) -> None:
        self._find: Callable[[str], list[NamedReading]]
        if mapping is None:
            self._find = lambda name: [(name, None)]
        elif isinstance(mapping, Mapping):
            self._find = TableLookup(mapping)
        elif callable(mapping):
            self._find = lambda name: _readings(mapping(name), name)
        else:
            raise CheckpointError(
                f"mapping is {type(mapping).__name__}; give the name of a built-in mapping, a "
                "table, or a function of a name"
            )

    def tensors(
        self, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, Reading | Transform | None, tuple[int, ...]]]:
        """(name, reading, entries of the array) of each tensor that an array of this name and shape
        holds.

        Raises:
            CheckpointError: the mapping does not know the name, or the array has other axes.
        """
        for tensor, reading in self._find(name):
            if not isinstance(reading, Reading) or not reading.stacks:
                yield tensor, reading, ()
                continue
            for index in itertools.product(*map(range, reading.counts(shape))):
                numbers = list(index)
                if reading.stacks[0] == "L":
                    numbers[0] = reading.start + reading.step * index[0]
                yield _filled(tensor, numbers), reading, index


class TableLookup:
    """Finds the targets of a name in a table."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._exact = {name: targets for name, targets in table.items() if "*" not in name}
        self._patterns = [
            (re.compile(re.escape(name).replace(r"\*", r"(\d+)") + r"\Z"), targets)
            for name, targets in table.items()
            if "*" in name
        ]

    def __call__(self, name: str) -> list[NamedReading]:
        if name in self._exact:
            return _readings(self._exact[name], name)
        for pattern, targets in self._patterns:
            if found := pattern.match(name):
                return [
                    (_filled(tensor, _numbers(found.groups(), reading)), reading)
                    for tensor, reading in _readings(targets, name)
                ]
        raise CheckpointError(
            "is in no entry of the mapping; add one, with None if it is to be left out"
        )


def _numbers(found: Sequence[str], reading: Reading | Transform | None) -> list[int]:
    """The numbers in a name, the layer as the model counts it."""
    layer, *others = map(int, found)
    if isinstance(reading, Reading):
        layer = reading.start + reading.step * layer
    return [layer, *others]


def _filled(tensor: str, numbers: Sequence[int]) -> str:
    for number in numbers:
        tensor = tensor.replace("*", str(number), 1)
    return tensor


def _readings(targets: Any, name: str) -> list[NamedReading]:
    """The targets in one form."""
    if targets is None:
        return []
    if isinstance(targets, str):
        return [(targets, None)]
    match targets:
        case (str(tensor), reading) if reading is None or not isinstance(reading, tuple):
            if isinstance(reading, str):
                reading = _pattern(reading)
            if reading is None or isinstance(reading, Reading) or callable(reading):
                return [(tensor, reading)]
        case list() | tuple():
            return [one for target in targets for one in _readings(target, name)]
    raise CheckpointError(
        f"has {targets!r:.100} in the mapping; give the name of a tensor, or (name, pattern)"
    )


@functools.cache
def _pattern(pattern: str) -> Reading:
    return Reading(pattern)


def apply_transform(transform: Transform, array: Any) -> Any:
    """The tensor that a function of the user makes of an array.

    Raises:
        CheckpointError: it raised an error.
    """
    try:
        return transform(array)
    except Exception as error:
        raise CheckpointError(f"cannot be transformed by the mapping: {error}") from error
