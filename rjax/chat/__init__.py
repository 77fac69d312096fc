"""A chat in the terminal; ``python -m rjax.chat`` starts it."""
