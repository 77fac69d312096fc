"""The command ``rjax bench``: load on a server, and throughput and latency of the engine."""
