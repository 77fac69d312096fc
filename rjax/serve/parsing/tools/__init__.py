"""Tool calls: showing functions to a model, and reading its calls."""
