"""The /docs page: the OpenAPI schema as self-contained HTML."""

import html
import json
from collections.abc import Iterator
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
details { border: 1px solid #8886; border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem }
summary { cursor: pointer } summary b { display: inline-block; min-width: 4.5rem }
table { border-collapse: collapse } td, th { text-align: left; padding: .1rem 1rem .1rem 0;
vertical-align: top } code, pre { font-family: ui-monospace, monospace } pre { overflow: auto }
"""


def docs_page(schema: dict[str, Any]) -> str:
    """The HTML of the page.

    Args:
        schema: OpenAPI 3 schema from `rjax.serve.api.openapi.describe`.
    """
    title = f"{_text(schema['info']['title'])} {_text(schema['info']['version'])}"
    routes = "".join(
        _operation(method, path, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    )
    schemas = "".join(_schema(*item) for item in sorted(schema["components"]["schemas"].items()))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>The same as JSON: openapi.json. Where the "
        "server has API keys, every route but /health, /ping and the page at / asks for one: "
        f"<code>Authorization: Bearer KEY</code>.</p><h2>Routes</h2>{routes}"
        f"<h2>Bodies and answers</h2>{schemas}</html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{_text(entry['name'])}<td>{_text(entry['in'])}"
        for entry in operation.get("parameters", ())
    )
    body = "".join(_links(operation.get("requestBody", {}).get("content", {})))
    answers = "".join(
        f"<tr><td>{_text(status)}<td>{_text(answer.get('description', ''))}"
        f"<td>{''.join(_links(answer.get('content', {})))}"
        for status, answer in sorted(operation["responses"].items())
    )
    return (
        f"<details><summary><b>{method.upper()}</b><code>{_text(path)}</code> "
        f"{_text(operation.get('summary', ''))}</summary>"
        f"<p>{_text(operation.get('description', ''))}</p>"
        + (f"<table>{rows}</table>" if rows else "")
        + (f"<p>Body: {body}</p>" if body else "")
        + f"<table>{answers}</table></details>"
    )


def _links(content: dict[str, Any]) -> Iterator[str]:
    for media, entry in content.items():
        name = entry.get("schema", {}).get("$ref", "").rpartition("/")[2]
        link = f' <a href="#{_text(name)}">{_text(name)}</a>' if name else ""
        yield f"<code>{_text(media)}</code>{link} "


def _schema(name: str, schema: dict[str, Any]) -> str:
    shown = json.dumps(schema, indent=2, ensure_ascii=False)
    return (
        f'<details id="{_text(name)}"><summary><code>{_text(name)}</code> '
        f"{_text(schema.get('description', ''))}</summary><pre>{_text(shown)}</pre></details>"
    )


def _text(value: object) -> str:
    return html.escape(str(value))
