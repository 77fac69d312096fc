"""The host side: requests, pages, scheduling, and the loop that drives the worker."""
