"""The plan of a step: which attention items a backend computes.

``work_list`` defines the plan. ``host`` makes it in NumPy and ``device`` inside jit; ``splits``
coalesces the KV splits of the host planner. ``check`` finds wrong values in a plan.
"""
