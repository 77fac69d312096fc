"""The OpenAI-compatible server; ``python -m rjax.serve`` starts it."""

BUNDLED_NAME = "tables"
"""What the bundled model is called where nothing else is said."""
