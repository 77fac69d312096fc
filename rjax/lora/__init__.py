"""Adapters, which rjax does not support."""
