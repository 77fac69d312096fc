"""The programs of an engine: how they are identified, compiled, kept on disk and warmed up.

- `keys`: what identifies a program of steps, its jitted function and its arguments.
- `cache`: compiled programs, in memory and on disk.
- `source`: what programs depend on, as digests and as bytes for another process.
- `warmup`: which programs are compiled in which order, and what serves meanwhile.
- `background_compiler`: the threads and processes that compile while the engine runs.
- `compile_process`: a process that compiles beside the engine, both of its ends.
"""
