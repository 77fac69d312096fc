"""The activation between the two products of a gated feed-forward block."""
