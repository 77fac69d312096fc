"""Tests of what a user touches: text in and out, the Python API, the command."""
