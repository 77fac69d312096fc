"""Routes that pause the engine and put it to sleep; for operators only."""

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from rjax.serve.api.routing import ServiceDep, operator_router
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.fields import shortened
from rjax.serve.protocol.responses import EngineStatus, PausedStatus, SleepingStatus

router = operator_router()

_FLAGS = {"true": True, "1": True, "false": False, "0": False, "": False}


@router.post("/pause")
async def pause(request: Request, service: ServiceDep) -> EngineStatus:
    """Schedule no new requests until /resume; they queue meanwhile. The answer comes when no step
    is under way.

    mode says what becomes of unfinished requests: abort ends them, wait lets those that have
    started finish, keep freezes them. wait_for_inflight_requests=true is mode=wait.
    clear_cache=true clears the prefix cache then; after new weights that is not needed.
    """
    given = _query(request, "mode", "wait_for_inflight_requests", "clear_cache")
    waits = _flag(given, "wait_for_inflight_requests")
    clears = _flag(given, "clear_cache")
    await service.engine.lifecycle.pause("wait" if waits else given.get("mode", "abort"))
    if clears:
        await service.engine.call_utility("reset_prefix_cache")
    return EngineStatus(status="paused")


@router.post("/resume")
async def resume(service: ServiceDep) -> EngineStatus:
    """End a pause."""
    await service.engine.lifecycle.resume()
    return EngineStatus(status="resumed")


@router.get("/is_paused")
async def is_paused(service: ServiceDep) -> PausedStatus:
    """Whether the engine is paused, or sleeps."""
    return PausedStatus(is_paused=await service.engine.lifecycle.is_paused())


@router.post("/sleep", response_class=Response)
async def sleep(request: Request, service: ServiceDep) -> Response:
    """Give back the memory of the KV pool and of the weights; requests get a 503 until /wake_up.

    level=1 copies the weights to the host; level=2 drops them, and /wake_up loads those of the
    checkpoint. mode is that of /pause.
    """
    given = _query(request, "level", "mode")
    text = given.get("level", "1")
    level = int(text) if text.isascii() and text.isdigit() and len(text) < 3 else text
    await service.engine.lifecycle.sleep(level, given.get("mode", "abort"))
    return Response()


@router.post("/wake_up", response_class=Response)
async def wake_up(request: Request, service: ServiceDep) -> Response:
    """Take the memory again, of all or of the given tags (tags=weights&tags=kv_cache); resume once
    all is there."""
    _query(request, "tags")
    await service.engine.lifecycle.wake_up(request.query_params.getlist("tags") or None)
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(service: ServiceDep) -> SleepingStatus:
    """Whether the engine sleeps, in part at least."""
    return SleepingStatus(is_sleeping=await service.engine.lifecycle.is_sleeping())


def _query(request: Request, *known: str) -> dict[str, Any]:
    """The parameters of a request's URL.

    Raises:
        ApiError: 400, one is not known.
    """
    for name in request.query_params:
        if name not in known:
            shown = repr(shortened(name))
            raise ApiError(400, f"there is no parameter {shown}; there are {', '.join(known)}")
    return dict(request.query_params)


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name, "").lower()
    if value not in _FLAGS:
        raise ApiError(400, f"{name} is {shortened(value)!r}; give true or false", param=name)
    return _FLAGS[value]
