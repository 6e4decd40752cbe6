"""Rendering of templates into one HTML file that loads nothing from elsewhere.

Jinja escapes all texts of a page. Data for its scripts are JSON in a script element that is not
executed. The content security policy allows the page's own scripts, by their checksums, and no
requests. A page may be sent to others, so absolute paths are removed from its texts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from featx.analysis.probe import interval_text, points_text, score_text, spread_text
from featx.base import printable, size_text, time_text

DASH = "\u2013"
"""Text for a missing number."""

_FILES = Path(__file__).parent / "page"
"""Folder of the templates, the style sheet and the scripts."""

_START = r"(?<![\w.~:<…/\\-])"
"""Position that is not inside a relative path, a URL or an expression."""

_ABSOLUTE = re.compile(
    _START
    + r"""
        (?:~|[A-Za-z]:)?            # home folder, drive of Windows
        (?:[/\\][^\s/\\'"`,;:()\[\]{}<>|=]+)+ [/\\]?
    """,
    re.VERBOSE,
)
"""An absolute path without spaces in a text."""


def render_page(template: str, scripts: Sequence[str], data: object, **values: object) -> str:
    """Render a template."""
    environment = Environment(
        loader=FileSystemLoader(_FILES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_controls,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number, "count": count, "percent": percent, "share": share,
        "seconds": time_text, "short_key": short_key, "p_value": p_value, "tally": tally,
        "size": size_text, "heading": heading, "typeset": typeset,
        "score": lambda *args: typeset(score_text(*args)),
        "spread": lambda *args: typeset(spread_text(*args)),
        "points": lambda share: points_text(share, "+"),
        "between": lambda *args: typeset(interval_text(*args)),
    }  # fmt: skip
    sources = [_text(name) for name in scripts]
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in sources]
    return environment.get_template(template).render(
        style=_text("page.css"),
        scripts=sources,
        hashes=" ".join(f"'sha256-{digest.decode()}'" for digest in digests),
        data=as_json(data),
        written=time.strftime("%d %B %Y").lstrip("0"),
        **values,
    )


def as_json(values: object) -> str:
    """Return JSON that cannot end its script element; NaN is not allowed."""
    values = _printable_values(values)
    text = json.dumps(values, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _without_controls(value: Any) -> object:
    """Escape the control characters in a text of a page; templates and scripts have none."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return printable(value, kept="\n\t") if is_text else value


def _printable_values(values: object) -> object:
    """JSON types with control characters of their texts escaped."""
    if isinstance(values, dict):
        return {printable(key): _printable_values(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_printable_values(value) for value in values]
    return printable(values, kept="\n\t") if isinstance(values, str) else values


def number(value: float | None) -> str:
    """Format a number with four digits; DASH if it is None or not finite."""
    if value is None or not math.isfinite(value):
        return DASH
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def count(value: int) -> str:
    """Format a count with narrow non-breaking spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def percent(value: float | None, digits: int = 1) -> str:
    """Format a share in [0, 1] as '12.3 %'; DASH if it is None or not finite."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{100 * value:.{digits}f}\u202f%"


def typeset(text: str) -> str:
    """Set a number of the terminal's text as on a page: '1234', '5.0 %', '1 - 2', '3 x 3', '-'."""
    if text.isdigit():
        return count(int(text))
    for plain, typographic in ((" %", "\u202f%"), (" - ", f" {DASH} "), (" x ", " \u00d7 ")):
        text = text.replace(plain, typographic)
    return DASH if text == "-" else text


def heading(name: str) -> str:
    """Return the name of a metric or column as it begins a line: 'Kappa', 'mIoU', 'R²'."""
    name = {"ECE": "calibration\nerror", "R2": "R²"}.get(name, name)
    return name if name[1:2].isupper() else name[:1].upper() + name[1:]


def tally(values: Iterable[str]) -> list[tuple[str, int]]:
    """Count equal values, the most frequent first."""
    return Counter(values).most_common()


def p_value(value: float) -> str:
    """Format a p-value: '0.31', '0.003', '< 0.001'."""
    if value < 0.001:
        return "< 0.001"
    return f"= {value:.3f}" if value < 0.1 else f"= {value:.2f}"


def share(value: float, of: float = 1) -> float:
    """Return a length in percent, 0 if `of` is 0."""
    return round(100 * value / of, 2) if of > 0 else 0.0


def short_key(key: str) -> str:
    """Return the last two parts of a key: names such as 0001.jpg occur in several folders."""
    parts = [part for part in key.split("/") if part]
    return "/".join(parts[-2:]) or key


def _text(name: str) -> str:
    """Read a file of the page; browsers normalise line ends before they compute a checksum."""
    text = (_FILES / name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def without_folders(text: str, folders: Iterable[str] = ()) -> str:
    """Replace every absolute path in a text by its last part: '/home/me/a.png' -> '…/a.png'."""
    for folder in sorted(folders, key=len, reverse=True):
        if len(folder) > 1:
            pattern = _START + re.escape(folder.rstrip("/\\"))
            last = _last_part(folder).replace("\\", r"\\")
            text = re.sub(rf"{pattern}(?=[/\\]\S)", "…", text)
            text = re.sub(rf"{pattern}(?![\w.-])", last, text)
    return _ABSOLUTE.sub(lambda match: _last_part(match.group()), text)


def without_folder(path: str) -> str:
    """Return the last part of an absolute path, and a relative one unchanged."""
    return _last_part(path) if re.match(r"(~|[A-Za-z]:)?[/\\]", path) else path


def _last_part(path: str) -> str:
    """Return the last part of a path, with an ellipsis for the others."""
    parts = [part for part in re.split(r"[/\\]+", path) if part]
    return f"…/{parts[-1]}" if parts else path
