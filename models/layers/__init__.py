"""The layers that all families are built of."""
