"""Configures the logs of a server's process."""

import logging

from rjax.serve.telemetry.repeated_errors import RepeatedErrors


def set_up_logs(*, access_log: bool, http_level: int) -> None:
    """Log to stderr, and log repeated errors in one line each (`RepeatedErrors`).

    Args:
        access_log: log a line for each request.
        http_level: level of the HTTP server's own log.
    """
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(RepeatedErrors())
    quiet = ["jax", "transformers"]
    if not access_log:
        quiet.append("rjax.serve.requests")
    for name in quiet:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(http_level)
