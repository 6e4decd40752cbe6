"""Parts of pages that scripts write, between `<!-- NAME, made by ... -->` and `<!-- /NAME -->`."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def with_part(text: str, name: str, made: str) -> str:
    """Return the text of a page with a part as a script has made it."""
    changed, count = re.subn(
        rf"(<!-- {name},[^>]*-->\n).*?(<!-- /{name} -->)",
        lambda found: f"{found[1]}\n{made}\n{found[2]}",
        text,
        flags=re.DOTALL,
    )
    if count != 1:
        raise SystemExit(f"expected one part <!-- {name}, ... --> ... <!-- /{name} -->")
    return changed
