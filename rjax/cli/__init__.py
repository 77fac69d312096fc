"""Shared parts of the commands: arguments, prompts, reports and errors."""
