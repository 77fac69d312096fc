"""Stores of responses and prefixes between requests, bounded for each tenant."""
