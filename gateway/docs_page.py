"""The API reference as one HTML page, rendered from the OpenAPI document; nothing is fetched."""

from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #8886; }
details { border: 1px solid #8886; border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; }
code { font-family: ui-monospace, monospace; font-size: .9em; }
.method { display: inline-block; min-width: 4.5rem; font-weight: 700; }
.access { float: right; opacity: .7; font-size: .85em; }
table { border-collapse: collapse; margin: .5rem 0; width: 100%; }
td, th { text-align: left; padding: .2rem .8rem .2rem 0; border-top: 1px solid #8883;
         vertical-align: top; }
"""


def docs_page(document: dict[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    info = document["info"]
    operations = "".join(
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    schemas = "".join(
        _schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        f"<p>{escape(info['summary'])}</p>"
        '<p>The same as a document for tools: <a href="/openapi.json">/openapi.json</a></p>'
        f"<h2>Routes</h2>{operations}<h2>Types</h2>{schemas}</body></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {})
    takes = "".join(
        f"<tr><th>takes</th><td>{escape(media)}</td><td>{_type_of(content['schema'])}</td></tr>"
        for media, content in body.items()
    )
    parameters = "".join(
        f"<tr><th>{escape(p['in'])}</th><td><code>{escape(p['name'])}</code></td>"
        f"<td>{escape(p.get('description', ''))}</td></tr>"
        for p in operation.get("parameters", ())
    )
    answers = "".join(
        f"<tr><th>{escape(status)}</th><td>{escape(media)}</td>"
        f"<td>{_type_of(content['schema'])}</td></tr>"
        for status, answer in operation["responses"].items()
        for media, content in answer["content"].items()
    )
    keys = " or ".join(name for option in operation["security"] for name in option) or "no key"
    return (
        f'<details><summary><span class="method">{method.upper()}</span> '
        f'<code>{escape(path)}</code> <span class="access">{escape(keys)}</span><br>'
        f"{escape(operation['summary'])}</summary>"
        f"<table>{parameters}{takes}{answers}</table></details>"
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{'' if field in required else ' (optional)'}</td>"
        f"<td>{_type_of(part)}</td><td>{escape(part.get('description', ''))}</td></tr>"
        for field, part in schema.get("properties", {}).items()
    )
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> '
        f"{escape(schema.get('description', ''))}</summary><table>{rows}</table></details>"
    )


def _type_of(schema: dict[str, Any]) -> str:
    """Return a schema as a few words, with links to the types it names."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}"><code>{name}</code></a>'
    if "anyOf" in schema:
        return " or ".join(_type_of(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in (
            ("minimum", "&ge;"),
            ("maximum", "&le;"),
            ("exclusiveMinimum", "&gt;"),
            ("exclusiveMaximum", "&lt;"),
        )
        if key in schema
    ]
    words = escape(str(schema.get("type", "any")))
    return f"{words} {', '.join(bounds)}".strip()
