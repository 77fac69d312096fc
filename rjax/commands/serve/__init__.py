"""The command ``rjax serve``: its options, and the server that they start."""
