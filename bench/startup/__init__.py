"""Time from launch to the first result."""
