"""The schema of the API as a page to read: plain HTML without scripts, and without requests to other sites."""

from collections.abc import Iterator
from html import escape
from typing import Any

from library.config.json_types import JsonMapping

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "code,pre{font:13px/1.5 ui-monospace,monospace}h2{margin-top:2.5rem;text-transform:capitalize}"
    "section{border-top:1px solid #8886;padding:.8rem 0}h3{margin:0 0 .3rem;font-size:1rem}"
    "h3 b{display:inline-block;min-width:3.2rem}p{margin:.3rem 0}"
    "table{border-collapse:collapse;margin:.4rem 0;width:100%}"
    "td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0;border-bottom:1px solid #8883}"
    "table{display:block;overflow-x:auto}a{color:inherit}"
)


def docs_html(schema: JsonMapping) -> str:
    """Return the page: operations by subject, each with what it takes and returns, and then the models."""
    info, paths = schema["info"], schema["paths"]
    by_tag: dict[str, list[str]] = {}
    for path, item in paths.items():
        for method, operation in item.items():
            by_tag.setdefault(operation.get("tags", ["other"])[0], []).append(_operation(method, path, operation))
    operations = "".join(f"<h2>{escape(tag)}</h2>{''.join(sections)}" for tag, sections in by_tag.items())
    models = "".join(_model(name, model) for name, model in schema["components"]["schemas"].items())
    title = f"{escape(info['title'])}: HTTP"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style></head>'
        f"<body><main><h1>{title}</h1><p>{escape(info['description'])}</p>"
        '<p>The same as <a href="openapi.json">openapi.json</a>, for programs.</p>'
        f"{operations}<h2>models</h2>{models}</main></body></html>"
    )


def _operation(method: str, path: str, operation: JsonMapping) -> str:
    """Return one operation: its address, parameters, body and answer."""
    about = operation.get("description") or ""
    parts = [f"<h3><b>{method.upper()}</b> <code>{escape(path)}</code></h3><p>{escape(operation['summary'])}.</p>"]
    parts += [f"<p>{escape(about)}</p>"] if about else []
    rows = [
        (p["name"], f"{_type(p['schema'])}, in the {p['in']}", p.get("description", "")) for p in _parameters(operation)
    ]
    parts += [_table(rows)] if rows else []
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    parts += [f"<p>Body: {_type(body['schema'])}</p>"] if body else []
    content = operation["responses"]["200"].get("content", {})
    answers = [_type(part["schema"]) if "schema" in part else f"<code>{kind}</code>" for kind, part in content.items()]
    parts += [f"<p>Answer: {', '.join(dict.fromkeys(answers))}</p>"] if answers else []
    return f'<section id="{escape(operation["operationId"])}">{"".join(parts)}</section>'


def _parameters(operation: JsonMapping) -> Iterator[JsonMapping]:
    yield from operation.get("parameters", ())


def _model(name: str, model: JsonMapping) -> str:
    required = set(model.get("required", ()))
    rows = [
        (field, _type(about) + ("" if field in required else ", optional"), about.get("description", ""))
        for field, about in model.get("properties", {}).items()
    ]
    text = escape(str(model.get("description") or ""))
    return f'<section id="model-{escape(name)}"><h3>{escape(name)}</h3><p>{text}</p>{_table(rows)}</section>'


def _type(schema: Any) -> str:
    """Return a type in words, with links to models."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#model-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum") or [schema["const"]]
        return " or ".join(f"<code>{escape(str(choice)) or '(empty)'}</code>" for choice in choices)
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    return escape(str(schema.get("type", "any value")))


def _table(rows: list[tuple[str, str, str]]) -> str:
    lines = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{escape(about)}</td></tr>"
        for name, kind, about in rows
    )
    return f"<table><tbody>{lines}</tbody></table>"
