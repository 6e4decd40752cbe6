"""Contract of import-linter: members of a family never import each other.

A member is a module that registers itself, so that a new one needs no entry in a list.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

_REGISTRATION = re.compile(r"^[A-Z]+\.register\(", re.M)
"""Statement of a module that registers a member, such as `SOURCES.register(...)`."""


class FamilyContract(Contract):
    """Members of one family import each other neither directly nor through other modules.

    Each direct module of one of the packages may be a member.
    """

    packages = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Find the imports between members of one family, of which there must be two."""
        imports = []
        for package in self.packages:  # type: ignore[attr-defined]  # a field holds its value
            members = {name for name in graph.find_children(package) if _is_member(name)}
            if len(members) < 2:
                raise ValueError(f"{package} has {len(members)} members; expected several.")
            imports += [
                " -> ".join([*route.heads, *route.middle, *route.tails])
                for dependency in graph.find_illegal_dependencies_for_layers((members,))
                for route in dependency.routes
            ]
        return ContractCheck(kept=not imports, metadata={"imports": sorted(imports)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the imports, one chain of modules in a line."""
        for chain in check.metadata["imports"]:
            output.print_error(chain)


def _is_member(module: str) -> bool:
    """Return whether a module registers a member."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return False
    return _REGISTRATION.search(Path(spec.origin).read_text(encoding="utf-8")) is not None
