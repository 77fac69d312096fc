"""The commands of ``rjax``; each module has its options and ``main``."""
