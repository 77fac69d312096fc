"""Checks of README.md, docs, deploy and rjax/examples."""
