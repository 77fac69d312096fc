"""Loading a checkpoint, compared with reading its files."""
