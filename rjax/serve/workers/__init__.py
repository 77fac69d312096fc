"""Worker processes for chat templates, tokenisation and grammar compilation of client text.

This work cannot be interrupted inside a process, and the size of its input does not bound its time.
`WorkerPool` therefore runs it in worker processes and kills a worker that takes too long or too
much memory. The `Zygote`, which has imported and loaded everything once, forks a new worker within
milliseconds. Everything that the server awaits from them has a time limit: workers and zygote may
be killed or stopped from outside. The modules `pool`, `task_slots`, `worker_process` and `zygote`
run in the server; the modules of the workers import neither jax nor the web framework.
"""
