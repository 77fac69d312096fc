"""The host side: requests, scheduling, pages, and the loop that drives a worker."""
