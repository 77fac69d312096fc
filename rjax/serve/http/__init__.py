"""Bytes and connections: the HTTP server, keys, limits, event streams; never fields of a body."""
