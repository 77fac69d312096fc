"""Loading checkpoints from a folder or the hub, and saving them."""
