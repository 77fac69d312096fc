"""Metrics and logs of the server."""
