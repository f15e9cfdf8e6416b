"""The pages of reports: one HTML file each, in which a model's text is text and nothing else."""

from __future__ import annotations

from typing import Any

import jinja2


def render(template: str, **values: Any) -> str:
    """A page from a template of this package. All values are escaped; ``percent`` writes a share, or – for None."""
    page = jinja2.Environment(
        loader=jinja2.PackageLoader("scaled", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    page.filters["percent"] = lambda share: "–" if share is None else f"{100 * share:.1f}%"
    return page.get_template(template).render(values)


def _visible(value: Any) -> Any:
    """Codes in a model's text, which would be invalid in the page or turn its order, as escapes."""
    if type(value) is not str:  # markup is our own
        return value
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in value)
