"""A reward for `use_trl.py`, whose GRPO script imports it by name."""


def reward(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    """A number from 0 to 1 that differs among the samples of a random model."""
    return [sum(token % 7 for token in ids) / (6 * len(ids)) for ids in completion_ids]
