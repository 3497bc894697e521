"""The OpenAPI description as one HTML page without scripts, so that it works where there is no network."""

import json
from html import escape
from typing import Any

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h2{border-top:1px solid #ccc;padding-top:1rem}code,pre{font:14px/1.4 ui-monospace,monospace;background:#f4f4f4}
pre{padding:.75rem;overflow:auto}table{border-collapse:collapse}td,th{padding:.2rem .75rem .2rem 0;
text-align:left;vertical-align:top}"""


def describe(document: dict[str, Any]) -> str:
    """HTML for an OpenAPI document: every operation with its body and answers, then the schemas."""
    title = escape(document["info"]["title"])
    found = [
        f"<h1>{title}</h1><p>Version {escape(document['info']['version'])}. The same as <a href='openapi.json'>JSON</a>.</p>"
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            found.append(f"<h2><code>{method.upper()} {escape(path)}</code> {escape(operation.get('summary', ''))}</h2>")
            found += [f"<p>{_words(text)}</p>" for text in operation.get("description", "").split("\n\n") if text]
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                found.append(f"<h3>Body: {escape(kind)}</h3>{_code(content['schema'])}")
            found.append(f"<h3>Answers</h3><table>{''.join(_answers(operation['responses']))}</table>")
    found.append("<h2>Schemas</h2>")
    for name, schema in document.get("components", {}).get("schemas", {}).items():
        found.append(f"<h3 id='{escape(name)}'>{escape(name)}</h3>{_code(schema)}")
    head = (
        f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{title}</title><style>{STYLE}</style>"
    )
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(found)}</body></html>"


def _answers(responses: dict[str, Any]) -> list[str]:
    rows = []
    for status, response in responses.items():
        schemas = [content.get("schema", {}).get("$ref", "") for content in response.get("content", {}).values()]
        names = [reference.rpartition("/")[2] for reference in schemas if reference]
        links = ", ".join(f"<a href='#{escape(name)}'>{escape(name)}</a>" for name in names)
        rows.append(f"<tr><td>{escape(status)}</td><td>{escape(response['description'])}</td><td>{links}</td></tr>")
    return rows


def _code(schema: dict[str, Any]) -> str:
    return f"<pre>{escape(json.dumps(schema, indent=2))}</pre>"


def _words(text: str) -> str:
    """Text with `code`."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))
