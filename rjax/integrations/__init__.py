"""Rollouts for trainers of other libraries; each module imports its trainer."""
