"""``python -m rjax.chat`` is the command ``rjax chat``."""

if __name__ == "__main__":
    from rjax.cli.process import run_module

    run_module("rjax chat", "rjax.commands.chat")
