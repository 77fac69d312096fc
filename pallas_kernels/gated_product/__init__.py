"""The two products and the activation that open a gated feed-forward block, for few rows."""
