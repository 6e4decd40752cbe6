"""Contract tests: one pytest class per family of plug-ins, which every member passes.

In: a member of a family, given by a fixture of a subclass. Out: tests of everything that featx
relies on in such a member. `docs/plugins.md` shows a subclass.
Names for others: `SourceContract`, `ModelLibraryContract`, `ReductionContract`, `CodecContract`,
`ExecutorContract`, `ExportContract`, `JobContract`. The package needs pytest.
"""

from __future__ import annotations

import pytest

# Without this, a failed assertion below would not show its values.
pytest.register_assert_rewrite(
    *(f"featx.testing.{name}" for name in ("sources", "models", "formats", "runs"))
)

from featx.testing.formats import CodecContract, ExportContract  # noqa: E402
from featx.testing.models import ModelLibraryContract, ReductionContract  # noqa: E402
from featx.testing.runs import ExecutorContract, JobContract  # noqa: E402
from featx.testing.sources import SourceContract  # noqa: E402

__all__ = [
    "CodecContract",
    "ExecutorContract",
    "ExportContract",
    "JobContract",
    "ModelLibraryContract",
    "ReductionContract",
    "SourceContract",
]
