"""Top-k routing: the experts of each row from the logits of a router."""
