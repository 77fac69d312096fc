"""Structured output: texts that match a JSON schema, a regex or a grammar, by token masks."""
