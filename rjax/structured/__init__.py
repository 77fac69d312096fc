"""Structured outputs: token masks for a JSON schema, a regex or a grammar."""
