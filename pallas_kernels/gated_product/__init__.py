"""The products of a gated feed-forward block up to its activation, in one launch."""
