"""The command ``rjax bench``: a module with the options of each benchmark."""
