"""Routes of the page."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rjax.serve.page.files import PAGE_PATHS, page_file

_HEADERS = {
    # No inline script, no other host, and no text that becomes HTML.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

router = APIRouter()


def page_response(path: str) -> Response:
    """The response with a file of the page.

    Args:
        path: one of `PAGE_PATHS`.
    """
    content, media_type = page_file(path)
    return Response(content, media_type=media_type, headers=_HEADERS)


async def _respond(request: Request) -> Response:
    return page_response(request.scope["route"].path)


for _path in sorted(PAGE_PATHS):
    router.add_api_route(_path, _respond, methods=["GET", "HEAD"], include_in_schema=False)
