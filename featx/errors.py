"""Everything featx raises on purpose.

    FeatxError
    ├── ConfigError (ValueError)        a key, a value, or two keys that do not go together
    ├── ModelError (ValueError)         no such model, or one that featx cannot feed
    │   └── WeightsError                weights that are missing, unreadable or of another model
    ├── LayerError (LookupError)        a layer that is not there, does not fire, or is ambiguous
    ├── ReduceError (ValueError)        a reduction that does not fit the tensor
    ├── DataError (ValueError)          no data set where the config says
    ├── MissingExtraError (ImportError) an optional package; the message names the pip extra
    ├── StoreError (OSError)            a store that cannot be read or gone on with
    │   ├── StoreMismatchError          what is asked differs from what the store was begun with
    │   ├── StoreLockedError            another process is writing this store
    │   └── ObjectStoreError            an object store refuses a request, or is not to be reached
    └── RunError (RuntimeError)         the run failed on its way; the store stays resumable
        ├── StorageError                a disk is full or fails, an object store does not answer
        ├── NonFiniteError              a feature is NaN, infinite, or over the dtype's range
        ├── TooManyFailuresError        more images fail than max_failures, and much is left to do
        └── GradientAlarm               gradients explode, vanish, or are not finite (gradients)
    InternalError (AssertionError)      a mistake in featx itself

Errors up to StoreError are the user's to mend and end the command with exit code 2;
RunError ends it with exit code 1.
"""

from __future__ import annotations

import difflib
import itertools
import os
import traceback
from collections.abc import Iterable

EXIT_TOO_MANY_FAILURES = 3
"""No error: the run is done, but more images failed than max_failures."""


class FeatxError(Exception):
    """Base of all errors raised on purpose; its message says what to do."""

    exit_code = 2

    def __str__(self) -> str:
        # OSError and LookupError format their arguments in ways of their own.
        return str(self.args[0]) if self.args else ""

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython and Jupyter show: the message, then where the user's code is.

        IPython asks any exception for this method. A script has the usual traceback, and so has a
        notebook with FEATX_DEBUG=1.
        """
        message = f"{type(self).__name__}: {self}"
        frames = traceback.extract_tb(self.__traceback__)
        if os.environ.get("FEATX_DEBUG") == "1":
            return [message, "", *"".join(traceback.format_exception(self)).splitlines()]
        inside = os.path.dirname(__file__)  # noqa: PTH120 - pathlib takes longer to import
        own = itertools.takewhile(lambda frame: not frame.filename.startswith(inside), frames)
        shown = [frame for frame in own if "IPython" not in frame.filename]
        where = "".join(traceback.format_list(shown)).splitlines()
        return [message, "", *where, "FEATX_DEBUG=1 shows the whole traceback."]


class ConfigError(FeatxError, ValueError):
    """A key is unknown, a value is out of range, or two keys contradict each other."""


class ModelError(FeatxError, ValueError):
    """The model does not exist or cannot be fed with a batch of images."""


class WeightsError(ModelError):
    """Weights are missing, cannot be downloaded, or belong to another model."""


class LayerError(FeatxError, LookupError):
    """A requested layer does not exist, never fires, fires several times, or is ambiguous."""


class ReduceError(FeatxError, ValueError):
    """The reduction does not fit the tensor that the layer gives."""


class DataError(FeatxError, ValueError):
    """The data set is not where the config says, or holds no image."""


class MissingExtraError(FeatxError, ImportError):
    """An optional package is not installed."""


class StoreError(FeatxError, OSError):
    """The store cannot be opened, read, or gone on with."""


class StoreMismatchError(StoreError):
    """The store was begun with other settings than those asked for now."""


class StoreLockedError(StoreError):
    """Another process holds the store for writing."""


class ObjectStoreError(StoreError):
    """An object store refuses a request, or is not to be reached; errno says which.

    Args:
        errno, strerror, filename: as of any OSError.
    """

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}."


class RunError(FeatxError, RuntimeError):
    """The run failed on its way; what was committed stays, the same command goes on."""

    exit_code = 1


class StorageError(RunError):
    """A disk is full or fails, or an object store does not answer; the command prints itself."""


class TooManyFailuresError(RunError):
    """More images failed than max_failures allows, long before the end."""


class NonFiniteError(RunError):
    """A feature is NaN or infinite, or too large for the store's dtype."""


class InternalError(AssertionError):
    """featx has broken one of its own rules; the traceback belongs into a bug report."""


def require(condition: bool, message: str) -> None:
    """Raise InternalError unless a condition holds; `assert` is left out under python -O.

    Args:
        condition: what the code that follows relies on.
        message: what is wrong otherwise.
    """
    if not condition:
        raise InternalError(message)


_ALSO_CALLED = {
    "mean": ("avg",),
    "average": ("avg",),
    "gap": ("avg",),
    "fp16": ("float16",),
    "half": ("float16", "fp16"),
    "float16": ("fp16",),
    "bf16": ("bfloat16",),
    "bfloat16": ("bf16",),
    "fp32": ("float32",),
    "float": ("float32", "fp32"),
    "float32": ("fp32",),
}
"""What other programs call a thing -> what it is called here."""


def counted(count: int, one: str, many: str | None = None) -> str:
    """A number with its noun: '1 row', '2 rows'.

    Args:
        count: the number.
        one, many: the words behind it; many is one with an s where it is not given.
    """
    return f"{count} {one if count == 1 else many or one + 's'}"


def nearest(name: str, known: Iterable[str], count: int = 5) -> str:
    """The clause that ends an 'unknown name' message: the nearest known names, or nothing.

    Args:
        name: what was asked for.
        known: the names there are.
        count: how many to offer at the most.
    """
    known = list(known)
    if also := [word for word in _ALSO_CALLED.get(name.lower(), ()) if word in known]:
        return f" Nearest: {', '.join(also)}."
    found = difflib.get_close_matches(name, known, n=count, cutoff=0.5)
    if not found:
        found = [k for k in known if name.lower() in k.lower()][:count]
    return f" Nearest: {', '.join(found)}." if found else ""
