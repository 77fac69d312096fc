"""Files that are run: compiled programs are code, whoever wrote them."""

import os
import stat


def distrust(found: os.stat_result) -> str | None:
    """Why what a file or folder holds must not run; None if it may.

    Its owner, root, and the members of its group are trusted, as far as they may write.

    Args:
        found: of the file or folder.
    """
    if not hasattr(os, "geteuid"):  # Windows has no such owners
        return None
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}, who could have put code there"
    if found.st_mode & stat.S_IWOTH:
        return "every user can write there; take that away with chmod o-w"
    return None
