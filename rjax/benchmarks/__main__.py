"""``python -m rjax.benchmarks`` is the command ``rjax bench``."""

if __name__ == "__main__":
    from rjax.cli.process import run_module

    run_module("rjax bench", "rjax.commands.bench.command")
