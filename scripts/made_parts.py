"""Parts of pages that scripts write, between `<!-- NAME, made by ... -->` and `<!-- /NAME -->`."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def with_part(page: Path, name: str, made: str) -> str:
    """Return the text of a page in which a part is as a script has made it."""
    changed, count = re.subn(
        rf"(<!-- {name},[^>]*-->\n).*?(<!-- /{name} -->)",
        lambda found: f"{found[1]}\n{made}\n{found[2]}",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    if count != 1:
        raise SystemExit(f"{page}: expected one part <!-- {name}, ... --> ... <!-- /{name} -->")
    return changed
