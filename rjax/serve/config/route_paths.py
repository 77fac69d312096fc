"""Paths of the server's routes, for checks before the routes are imported."""

from rjax.errors import InvalidConfigError
from rjax.serve.page.files import PAGE_PATHS

ROUTE_PATHS = (
    *PAGE_PATHS,
    "/page/demo",
    *("/health", "/ping", "/load", "/version", "/metrics"),
    *("/tokenizer_info", "/openapi.json", "/docs"),
    *("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model:path}"),
    "/invocations",
    *("/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"),
    "/v1/responses/{response_id}/cancel",
    *("/v1/prefixes", "/v1/prefixes/{name}", "/tokenize", "/detokenize"),
    *("/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping"),
    *("/server_info", "/get_world_size", "/init_weight_transfer_engine", "/start_weight_update"),
    *("/update_weights", "/finish_weight_update", "/cancel_weight_update", "/reset_prefix_cache"),
    "/inference/v1/generate",
    *("/health/", "/get_world_size/", "/generate/", "/init_communicator/", "/close_communicator/"),
    *("/update_named_param/", "/reset_prefix_cache/"),
    *("/pooling", "/v1/score", "/v1/rerank", "/v1/embeddings"),
)
"""The path of every route of `rjax.serve.api.app`."""


def check_root_path(root_path: str) -> None:
    """Check that no route starts with the root path.

    Raises:
        InvalidConfigError: a route starts with the root path.
    """
    for path in ROUTE_PATHS:
        if root_path and (path + "/").startswith(root_path + "/"):
            raise InvalidConfigError(
                f"--root-path is {root_path!r}, with which the route {path} begins; give the path "
                "before it"
            )
