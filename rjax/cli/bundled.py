"""What the commands call the bundled model."""

BUNDLED_NAME = "tables"
"""Name of the bundled model where none is given."""
