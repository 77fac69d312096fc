"""rjax compared with torch on the same weights."""
