"""``python -m rjax.quantize`` is the command ``rjax quantize``."""

if __name__ == "__main__":
    from rjax.cli.process import run_module

    run_module("rjax quantize", "rjax.commands.quantize")
