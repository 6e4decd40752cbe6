"""Record of an earlier forward pass, with which later passes are compared."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from featx.errors import RunError


@dataclass(frozen=True)
class Expected:
    """Course of an earlier forward pass; a pass that does anything else is an error.

    Attributes:
        fired: names of the captures in the order in which they fire, or None if not yet known.
        operations: result of `Trace.operations_up_to` for the captures, or None to allow any.
        calls: (module, kind of capture) -> number of calls of the module in a whole pass, or None
            to allow any number. Not checked in passes that end early.
        stop: whether to end the pass by an exception after the last of `fired`. Not used under
            torch.compile, which removes unused computation itself, nor for gradients, which come
            after the forward pass.
    """

    fired: Sequence[str] | None = None
    operations: Sequence[str] | None = None
    calls: Mapping[tuple[str, str], int] | None = None
    stop: bool = False

    def ends_after(self, fired: Sequence[str]) -> bool:
        """Return whether to end the pass now that the given captures have fired."""
        return self.stop and self.fired is not None and len(fired) >= len(self.fired)

    def check(
        self,
        fired: Sequence[str],
        calls: Mapping[tuple[str, str], int],
        operations: Sequence[str],
        num_until_capture: int,
    ) -> None:
        """Compare a pass with the expected one.

        Args:
            fired: names of captures, in order.
            calls: (module, kind of capture) -> number of calls of the module.
            operations: operations of the modules with a captured operation, in order.
            num_until_capture: length of `operations` when the last captured operation had run.

        Raises:
            RunError: the passes differ.
        """
        if self.calls is not None and not self.stop:
            check_calls(calls, self.calls)
        missing = [name for name in self.fired or () if name not in fired]
        if not missing:
            self._check_operations(operations, num_until_capture)
        if self.fired is not None and list(fired) != list(self.fired):
            raise RunError(
                f"the forward pass differs from the trial pass: {missing or list(fired)} "
                f"{'did not fire' if missing else 'fired'}, expected {list(self.fired)}. The model "
                "runs different layers for different batches, so its rows are not reproducible."
            )

    def _check_operations(self, operations: Sequence[str], num_until_capture: int) -> None:
        """Compare the operations up to the last captured one, and name the first difference."""
        if self.operations is None or list(operations[:num_until_capture]) == list(self.operations):
            return
        operations = operations[: max(num_until_capture, len(self.operations))]
        pairs = itertools.zip_longest(operations, self.operations, fillvalue="nothing")
        actual, expected = next(pair for pair in pairs if pair[0] != pair[1])
        raise RunError(
            f"the forward pass differs from the trial pass: {actual} ran, expected {expected}. The "
            "model runs different operations for different batches, so a name means different "
            "operations and its rows are not reproducible."
        )


def check_calls(
    calls: Mapping[tuple[str, str], int], expected: Mapping[tuple[str, str], int]
) -> None:
    """Compare the numbers of calls in two passes.

    Args:
        calls: (module, kind of capture) -> number of calls; a missing module was not called.
        expected: the same for the earlier pass.

    Raises:
        RunError: a number differs.
    """
    for key, num_before in expected.items():
        if (num_now := calls.get(key, 0)) != num_before:
            raise RunError(
                f"the layer {key[0]!r} is called {_times(num_now)} in a pass over images, and was "
                f"called {_times(num_before)} in the first pass. The model runs different layers "
                "for different batches, so the name means different calls and its rows are not "
                "reproducible. Choose a layer that is called equally often for every image."
            )


def _times(count: int) -> str:
    """A number of calls in words."""
    return {0: "not at all", 1: "once"}.get(count, f"{count} times")


ANYTHING = Expected()
"""Expectation for a first pass: everything is allowed."""
