"""Runnable examples: ``python -m rjax.examples.first_steps`` and its neighbours.

All of them run with the bundled model, on a CPU or a GPU. It answers questions about a table of
people; `rjax.LLM` takes the name of any other model.
"""
