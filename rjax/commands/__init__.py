"""The short commands ``rjax models`` and ``rjax info``."""
