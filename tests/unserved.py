"""Families that load and compute logits, and that the engine does not serve.

Tests that build an engine leave out their goldens, and docs/models.md does not name them.
"""

UNSERVED = frozenset({"Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"})
"""Their architectures."""
UNSERVED_CASES = ("qwen3_next_", "qwen3_5_")
"""Starts of the names of their goldens."""
