"""Checks who can write a file whose content runs."""

import os
import stat


def distrust(found: os.stat_result) -> str | None:
    """The reason not to run what a file or folder holds; None if it may run.

    The user of this process, root, and the members of the file's group are trusted.

    Args:
        found: stat result of the file or folder.
    """
    if not hasattr(os, "geteuid"):  # Windows has no such owners
        return None
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}, who could have put code there"
    if found.st_mode & stat.S_IWOTH:
        return "every user can write there; take that away with chmod o-w"
    return None
