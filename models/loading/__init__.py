"""From a folder or a hub id to parameters on devices, and back to a folder."""
