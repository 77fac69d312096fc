"""How many examples a property is tried on: a quarter in the default run, all in a thorough one."""

import hypothesis

_ALL = 100  # of the profile "thorough"; "quick" has fewer


def num_examples(thorough: int) -> int:
    """Number of examples for the profile of this run, of those that a thorough run takes."""
    default = hypothesis.settings.default
    assert default is not None
    return max(5, thorough * min(default.max_examples, _ALL) // _ALL)
