"""What featx promises is checked by code that runs, also under python -O."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import featx
from featx.config import Kind, option_tree
from featx.jobs import JOBS


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


def messages() -> Iterator[tuple[str, str]]:
    """Place and text of every string but docstrings, with … for what an f-string inserts."""
    folder = Path(featx.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        inner: set[ast.AST] = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [piece.value if isinstance(piece, ast.Constant) else "…" for piece in pieces]
            if isinstance(node, ast.JoinedStr):
                inner.update(pieces)
            if isinstance(node, ast.JoinedStr | ast.Constant) and node not in inner:
                place = f"{path.relative_to(folder)}:{node.lineno}"
                yield place, "".join(str(text) for text in texts)


def is_option(name: str) -> bool:
    """Whether an option has this name, or takes names such as executor.sbatch.mem."""
    parts = name.split(".")
    above = [option_tree().get(".".join(parts[: i + 1])) for i in range(len(parts))]
    return name in option_tree() or any(each and each.kind is Kind.MAPPING for each in above)


def test_options_in_messages_exist_and_are_read_by_the_job_beside_them() -> None:
    """An option that was renamed or removed is often still in a message."""
    groups = {
        name for name, each in option_tree().items() if each.kind in (Kind.GROUP, Kind.SECTION)
    }
    wrong = []
    for place, text in messages():
        for name in re.findall(r"(?<![\w.])([a-z_]+(?:\.[a-z_]+)+)=", text):
            if name.partition(".")[0] in groups and not is_option(name):
                wrong.append(f"{place}: {name}")
        for job, options in re.findall(r"\bjob=([a-z]+)((?: '?[a-z_.]+=[^ ]+)+)", text):
            names = re.findall(r"([a-z_.]+)=", options)
            wrong += [
                f"{place}: {job} {name}" for name in names if not JOBS.get(job).may_read(name)
            ]
    assert wrong == []


def test_a_shell_takes_the_options_in_messages_as_they_stand() -> None:
    """zsh looks for files that match an unquoted `[` or `*`, and a shell divides at blanks.

    What was given is repeated without quotes, with a colon behind it.
    """
    value = r"(\[[^\]]*\]|\{[^}'\"]*\}|[^\s'\",;]*\*[^\s'\",;]*)(?!:)"
    wrong = [
        f"{place}: {name}={given}"
        for place, text in messages()
        for name, given in re.findall(rf"(?<![\w.'\"])([a-z_]+(?:\.[a-z_]+)*)={value}", text)
        if is_option(name)
    ]
    assert wrong == []


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
