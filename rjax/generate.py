"""``python -m rjax.generate`` is the command ``rjax generate``."""

if __name__ == "__main__":
    from rjax.cli.process import run_module

    run_module("rjax generate", "rjax.commands.generate")
