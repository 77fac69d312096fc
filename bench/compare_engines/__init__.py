"""The same requests through rjax and another engine."""
