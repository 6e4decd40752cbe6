"""Puts conf/ and data/ inside a built wheel; an editable install reads them from the checkout."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShippedFolders(BuildHookInterface):
    """Wheel only; `featx.base.installation.shipped_folder` looks in both places."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel" and version != "editable":
            for name in ("conf", "data"):
                build_data["force_include"][name] = f"featx/_shipped/{name}"
