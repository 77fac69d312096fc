"""The activation of a gated feed-forward block."""
