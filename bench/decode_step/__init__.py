"""Device time of a whole decode step, compared with its roofline."""
