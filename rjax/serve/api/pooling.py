"""Routes of pooling models; refused, because no supported model family pools."""

from rjax.serve.api.routing import ServiceDep, private_router
from rjax.serve.protocol.errors import ApiError

router = private_router()


@router.post("/v1/embeddings")
@router.post("/v1/rerank")
@router.post("/v1/score")
@router.post("/pooling")
async def pool(service: ServiceDep) -> None:
    """Refuse the request: the served model generates text."""
    raise ApiError(
        404,
        f"the model {service.model!r} generates text and gives no embeddings, scores or rankings, "
        "like every model that this server supports; use a server with an embedding model",
        code="not_supported",
    )
