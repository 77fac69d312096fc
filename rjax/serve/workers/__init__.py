"""Work on a client's text in processes that can be ended: templates, tokenising, grammars.

None of it can be interrupted inside a process, and its time is not bounded by the size of its
input. `WorkerPool` therefore keeps worker processes and kills one that takes too long or too much
memory; the `Zygote`, which has imported and loaded everything once, forks a new one within
milliseconds. The modules of the server's side are `pool`, `lanes` and `zygote`; the workers' side
imports neither jax nor the web framework.
"""
