"""A mixture of experts: the routing of rows to experts, and the experts' feed-forward blocks."""
