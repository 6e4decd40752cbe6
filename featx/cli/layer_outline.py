"""Outline of a model: the modules that job=layers lists instead of all of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from featx.base import glob_to_regex
from featx.layers import Trace

MOST = 0.8
"""Share of the operations of a model from which a module is replaced by the modules inside it."""

MUCH = 0.25
"""Share of the operations of the largest module from which a module counts as a stage."""


def outline(traced: Trace, depth: int) -> frozenset[str]:
    """Return the names of the modules down to a depth.

    Depth 1 is the top level of the model. A module that computes nearly everything, such as the
    `blocks` or `features` of many models, tells nothing, so the modules inside it take its place.
    """
    modules_inside = _modules_inside(traced)
    max_mflops = MOST * traced.calls[-1].mflops

    def open_module(module: str) -> list[str]:
        names = []
        for name in modules_inside.get(module, ()):
            mflops = sum(call.mflops for call in traced.by_module[name])
            names += (
                open_module(name)
                if modules_inside.get(name) and mflops > max_mflops > 0
                else [name]
            )
        return names

    listed_modules = level = open_module("")
    for _ in range(depth - 1):
        level = [name for module in level for name in modules_inside.get(module, ())]
        listed_modules = [*listed_modules, *level]
    return frozenset(listed_modules)


def last_stage(traced: Trace, modules: Collection[str]) -> str | None:
    """Return the last module that calls others and computes much, or None if there is none."""
    modules_inside = _modules_inside(traced)
    mflops = {name: traced.by_module[name][0].mflops for name in modules if name in modules_inside}
    min_mflops = MUCH * max(mflops.values(), default=0.0)
    stages = [name for name in traced.by_module if mflops.get(name, 0.0) > min_mflops]
    return stages[-1] if stages else None


def matching_names(request: str, names: Iterable[str]) -> list[str]:
    """Return the names of rows that a name or a glob of the option `layers` means.

    Calls and elements belong to the module: 'relu' and '*' match 'relu@2' and 'relu[0]'.

    Args:
        request: name or glob, with its kind of capture after a colon, as in 'layer4:input'.
    """
    requested, _, kind = request.partition(":")
    pattern = re.compile(glob_to_regex(requested))
    matches = []
    for name in names:
        stem, _, row_kind = name.partition(":")
        module = re.split(r"[@\[]", stem)[0]
        if row_kind == kind and (
            stem == requested or pattern.fullmatch(stem) or pattern.fullmatch(module)
        ):
            matches.append(name)
    return matches


def _modules_inside(traced: Trace) -> dict[str, list[str]]:
    """Return, for each module, the called modules directly inside it, in execution order.

    A container such as nn.ModuleList is not called itself, and does not count as a level.
    """
    inside: dict[str, list[str]] = {}
    for name in traced.by_module:
        if not name:
            continue
        parent = name.rpartition(".")[0]
        while parent and parent not in traced.by_module:
            parent = parent.rpartition(".")[0]
        inside.setdefault(parent, []).append(name)
    return inside
