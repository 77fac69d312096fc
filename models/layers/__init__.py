"""The blocks every family is made of."""
