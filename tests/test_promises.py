"""What featx promises is checked by code that runs, also under python -O."""

from __future__ import annotations

import ast
from pathlib import Path

import featx


def narrows_a_type(test: ast.expr) -> bool:
    """Whether a condition only tells a type checker something: not None, or isinstance."""
    if isinstance(test, ast.Compare):
        [operator], [other] = test.ops, test.comparators
        return (
            isinstance(operator, ast.IsNot)
            and isinstance(other, ast.Constant)
            and other.value is None
        )
    return (
        isinstance(test, ast.Call)
        and isinstance(test.func, ast.Name)
        and test.func.id in ("isinstance", "_is_mapped")
    )


def test_asserts_only_narrow_types() -> None:
    """Anything else is `require`, or an error that says what to do."""
    folder = Path(featx.__file__).parent
    others = [
        f"{path.relative_to(folder)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(folder.rglob("*.py"))
        if "assert" in (source := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(source))
        if path.parent.name != "testing"  # tests for others
        and isinstance(node, ast.Assert)
        and not narrows_a_type(node.test)
    ]
    assert others == []
