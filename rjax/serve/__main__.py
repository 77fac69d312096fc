"""``python -m rjax.serve`` is the command ``rjax serve``."""

if __name__ == "__main__":
    from rjax.cli.process import run_module

    run_module("rjax serve", "rjax.commands.serve.command")
