"""Servers, loads and models of the server benchmarks."""
