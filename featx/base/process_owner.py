"""Whether this process belongs to featx: it runs the command, or it is a worker of a run.

A process of a user, who has imported featx, keeps its settings: the allocator, sys.path.
"""

from __future__ import annotations

_is_own = False


def own_process() -> None:
    """Declare that this process runs the command or is a worker of a run."""
    global _is_own
    _is_own = True


def is_own_process() -> bool:
    """Return whether `own_process` was called in this process, or in the one that forked it."""
    return _is_own
