"""The Chromium of this system."""

import shutil

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
"""Path of the program, or None. Playwright's own download is not used."""
