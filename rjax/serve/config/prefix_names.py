"""Names of prefixes."""

from rjax.serve.config.limits import ServeLimits


def is_valid_name(name: str, limits: ServeLimits) -> bool:
    """Whether a prefix name is valid."""
    plain = name.isascii() and all(c.isalnum() or c in "._-" for c in name)
    # HTTP clients resolve "." and ".." in a path, so no request could use these names.
    return plain and 1 <= len(name) <= limits.name_chars and name not in (".", "..")
