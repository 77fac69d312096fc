"""The OpenAI-compatible server; ``python -m rjax.serve`` starts it."""
