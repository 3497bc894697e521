"""Pages from jinja2 templates, with every value escaped. All HTML pages extend ``base.html.j2`` and
thus share one style.
"""

import base64
import re
import shlex
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

OWN = "flowrl.run.report"
"""The package with the templates that others extend."""


def render(template: str, package: str = OWN, **values: Any) -> str:
    """Render `template` from the folder ``templates`` of `package`.

    Templates of other packages can extend ``base.html.j2`` and import ``macros.html.j2`` (figures,
    tables, lists of settings). Filters: ``inline`` formats `code`, *emphasis* and links to pages,
    ``data_uri`` embeds a PNG, ``code`` writes Markdown code, ``quoted`` quotes a word of a shell.
    Values are escaped in HTML; in Markdown (``.md.j2``) they are not, so write them with ``code``.

    Args:
        template: file name of the template.
        package: the package with the template.
        **values: variables of the template.

    Returns:
        The text of the page.

    Raises:
        UndefinedError: a value is missing (jinja2's exception).
    """
    return _environment(package).get_template(template).render(values)


@cache
def _environment(package: str) -> "Environment":
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    loader = ChoiceLoader([PackageLoader(name) for name in dict.fromkeys((package, OWN))])
    environment = Environment(
        loader=loader,
        autoescape=lambda name: name is None or not name.endswith(".md.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"inline": inline, "data_uri": data_uri, "code": markdown_code}
    environment.filters["quoted"] = shlex.quote
    return environment


def inline(text: str) -> "Markup":
    """HTML of a line of text with `code`, *emphasis* and [links](to/other-pages.md#part) as in
    Markdown; pages are HTML files.
    """
    from markupsafe import Markup, escape

    emphasised = re.sub(r"(?<![\w*])\*(\w[^*`]*\w)\*(?![\w*])", r"<em>\1</em>", str(escape(text)))
    linked = re.sub(
        r"\[([^\[\]]+)\]\(([\w./-]+)\.md(#[\w-]+)?\)", r'<a href="\2.html\3">\1</a>', emphasised
    )
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", linked))


def data_uri(png: bytes) -> str:
    """A PNG as a data URI for an HTML image."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def markdown_code(text: object) -> str:
    """`text` as Markdown code on one line, whatever characters it contains."""
    line = " ".join(str(text).split())
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    space = " " if "`" in line else ""
    return f"{ticks}{space}{line}{space}{ticks}"
