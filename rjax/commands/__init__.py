"""The commands ``rjax generate``, ``quantize``, ``models`` and ``info``."""
