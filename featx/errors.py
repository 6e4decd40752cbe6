"""Exceptions of featx.

    FeatxError
    ├── ConfigError (ValueError)        invalid option or value, or options that contradict
    ├── ModelError (ValueError)         unknown model, or one that featx cannot feed
    │   └── WeightsError                weights that are missing, unreadable or of another model
    ├── LayerError (LookupError)        a layer that does not exist, does not run, or is ambiguous
    ├── ReduceError (ValueError)        a reduction that does not fit the tensor
    ├── DataError (ValueError)          no data set at the configured location
    ├── MissingExtraError (ImportError) an optional package; the message names the pip extra
    ├── StoreError (OSError)            a store that cannot be read or resumed
    │   ├── StoreMismatchError          a request that does not fit the existing store
    │   ├── StoreLockedError            another process writes this store
    │   └── ObjectStoreError            an object store refuses a request or cannot be reached
    └── RunError (RuntimeError)         the run failed; the store stays resumable
        ├── StorageError                a disk is full or fails, an object store does not answer
        ├── NonFiniteError              a feature is NaN, infinite, or over the dtype's range
        ├── TooManyFailuresError        more images fail than max_failures, with much left to do
        └── GradientAlarm               gradients explode, vanish, or are not finite (gradients)
    InternalError (AssertionError)      a bug in featx

All but RunError and InternalError can be fixed by the user and end the command with exit code 2;
RunError ends it with exit code 1.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import traceback
from collections.abc import Iterable, Sequence

EXIT_TOO_MANY_FAILURES = 3
"""Exit code of a completed run in which more images failed than max_failures allows."""


class ShortTraceback(BaseException):
    """Base class of exceptions of which notebooks show the message and the user's own code."""

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython and Jupyter show: the message, then the position in the user's code.

        IPython calls this method of any exception that has it. Scripts show the usual traceback,
        and so do notebooks with FEATX_DEBUG=1.
        """
        message = f"{type(self).__name__}: {self}"
        frames = traceback.extract_tb(self.__traceback__)
        if os.environ.get("FEATX_DEBUG") == "1":
            return [message, "", *"".join(traceback.format_exception(self)).splitlines()]
        # pathlib takes longer to import.
        inside, library = map(os.path.dirname, (__file__, os.__file__))
        own = itertools.takewhile(lambda frame: not frame.filename.startswith(inside), frames)
        shown = [
            frame
            for frame in own
            if not frame.filename.startswith(library) and "site-packages" not in frame.filename
        ]
        where = "".join(traceback.format_list(shown)).splitlines()
        return [message, "", *where, "FEATX_DEBUG=1 shows the whole traceback."]


class FeatxError(ShortTraceback, Exception):
    """Base class of the errors of a command, a store or a model; the message says what to do.

    A wrong key, index or argument in Python may also raise KeyError, IndexError, TypeError or
    ValueError, as a dict, an array and a torch data set do: `store.row("nope")` is a KeyError.
    """

    exit_code = 2
    """Exit code of the command."""

    def __str__(self) -> str:
        # OSError and LookupError format their arguments differently.
        return str(self.args[0]) if self.args else ""


class ConfigError(FeatxError, ValueError):
    """An option is unknown, a value is out of range, or two options contradict each other."""


class ModelError(FeatxError, ValueError):
    """The model does not exist or cannot process a batch of images."""


class WeightsError(ModelError):
    """Weights are missing, cannot be downloaded, or belong to another model."""


class LayerError(FeatxError, LookupError):
    """A requested layer does not exist, never runs, runs several times, or is ambiguous."""


class ReduceError(FeatxError, ValueError):
    """The reduction does not fit the tensor that the layer returns.

    `advice` names reductions that may fit; model.window replaces it, as others fit its maps.
    """

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(problem, advice)
        self.problem, self.advice = problem, advice

    def __str__(self) -> str:
        return f"{self.problem} {self.advice}".rstrip()


class DataError(FeatxError, ValueError):
    """The data set does not exist at the configured location, or contains no image."""


class MissingExtraError(FeatxError, ImportError):
    """An optional package is not installed."""


class StoreError(FeatxError, OSError):
    """The store cannot be opened, read or resumed."""


class StoreMismatchError(StoreError):
    """The store was started with other settings than those requested now."""


class StoreLockedError(StoreError):
    """Another process holds the store for writing."""


class ObjectStoreError(StoreError):
    """An object store refuses a request, or cannot be reached; errno tells which, and filename is
    the URL of the object.
    """

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}."


class RunError(FeatxError, RuntimeError):
    """The run failed; committed parts are kept, and the same command resumes."""

    exit_code = 1


class StorageError(RunError):
    """A disk is full or fails, or an object store does not answer.

    The command prints after the message how to resume.
    """


class TooManyFailuresError(RunError):
    """More images failed than max_failures allows, long before the end of the run."""


class NonFiniteError(RunError):
    """A feature is NaN or infinite, or too large for the dtype of the store."""


class InternalError(AssertionError):
    """featx has violated one of its own rules; the traceback belongs in a bug report."""


def require(condition: bool, message: str) -> None:
    """Raise InternalError unless a condition holds; unlike `assert`, also under python -O."""
    if not condition:
        raise InternalError(message)


_ALSO_CALLED = {
    "avg": "mean average gap",
    "float16": "fp16 half",
    "fp16": "float16 half",
    "bfloat16": "bf16",
    "bf16": "bfloat16",
    "float32": "fp32 float",
    "fp32": "float32 float",
    "embedding": "pooler_output penultimate pre_logits",
    "output": "logits",
    "extract": "embed embeddings features resume run",
    "attribute": "explain gradcam heatmap saliency",
    "neighbors": "nearest retrieval search knn similar similarity",
    "duplicates": "copies dedup near-duplicates similar similarity",
    "outliers": "anomalies anomaly novelty odd",
    "mislabelled": "cleanlab label_errors mislabels noisy_labels wrong_labels wronglabels",
    "probe": "accuracy classifier classify eval evaluate fit knn train",
    "predict": "classify infer inference",
    "cka": "similarity",
    "layer_similarity": "cka",
    "export": "convert csv",
    "parquet": "pandas",
    "csv": "excel xlsx pandas",
    "npy": "numpy",
    "report": "gallery html plot show tsne umap",
    "verify": "check validate",
    "device": "gpu gpus cuda",
    "reduce": "pooling",
    "out": "output_dir save_to",
    "data.root": "data.path data.folder data.dir data.directory",
    "data.workers": "num_workers",
    "executor.workers": "num_workers",
    "model.weights": "pretrained model.pretrained model_pretrained",
    "probe.test_share": "probe.test_size",
    "torchvision": "cifar10 cifar100 cifar mnist",
    "folder": "imagefolder imagenet",
    "webdataset": "imagenet tar wds",
    "huggingface": "hf datasets",
    "table": "parquet",
}
"""Name in featx -> its names in other programs, separated by spaces. If a word stands for several
names of featx, they are offered in this order, an option such as data.root also as the keyword
data_root of Python."""


_BENCH = "`scripts/benchmark peers` of the source repository compares featx with a plain script"
_PROJECTOR = "tensorboard=1000, with the command of the store, writes the projector with images"
_REPLACED = {
    "bench": _BENCH,
    "job=bench": _BENCH,
    "codec=lzf": "the nearest codec that remains is codec=zstd, or codec=gzip, which every HDF5 "
    "library reads",
    "codec=blosc2": "the nearest codec that remains is codec=zstd",
    "export.format=lance": "lance reads the files of export.format=parquet",
    "export.format=projector": _PROJECTOR,
    "export.format=tensorboard": _PROJECTOR,
    "export.format=thingsvision": "export.format=npy writes the same arrays, with keys.npy",
    "job.depth": "'layers=[**]' lists every layer, 'layers=[layer4.**]' those inside layer4",
    "models.local": "job.show=local does the same",
    "report.compare_stores": "'store=[A,B]' names the store of the page and the others",
    "probe.compare_store": "'store=[A,B]' names this store and the other one",
    "attribute.layer": "'layers=[NAME]' names it",
    "distance.subset_rows": "subsets have 1000 rows of each store; "
    "featx.similarity.data_set_distance takes other numbers",
    "export.metric": "export.format=faiss reads neighbors.metric",
    "export.clam": "export.format=clam writes its files",
    "export.target_magnification": "'export.magnification=[40,20]' says both",
    "outliers.show": "outliers.csv has all rows, and 10 are printed",
    "outliers.k": "job=outliers reads neighbors.k",
    "outliers.metric": "job=outliers reads neighbors.metric",
    "mislabelled.show": "mislabelled.csv has all rows, and 10 are printed",
    "mislabelled.folds": "job=mislabelled reads probe.folds",
    "mislabelled.label_column": "job=mislabelled reads probe.label_column",
    "duplicates.standardise": "job=duplicates reads neighbors.standardise",
    "executor.devices": "executor.workers=2 takes the first two GPUs, those of the environment "
    "variable CUDA_VISIBLE_DEVICES if that is set",
    "executor.gres": "'executor.sbatch={gres: gpu:1}' takes options of sbatch",
    "executor.partition": "'executor.sbatch={partition: gpu}' takes options of sbatch",
    "executor.account": "'executor.sbatch={account: NAME}' takes options of sbatch",
    "executor.memory_gib": "'executor.sbatch={mem: 32G}' takes options of sbatch",
    "part_mib": "part_rows=N says how many rows a part has",
    "conformance.images": "8 images are compared",
    "attribute.stride": "the square moves by half of attribute.window",
    "cka.rsa_distance": "rsa_cosine is one of cka.measures",
    "cka.other_store": "'store=[A,B]' names both stores",
    "distance.other_store": "'store=[A,B]' names both stores",
    "distance.subsets": "KID is the mean over 100 subsets",
    "data.crop_ratio": "the quotient of width and height of crops is from 3/4 to 4/3",
    "data.labels": "data.label_column names the dataset of the labels",
    "model.entry": "model.factory names the function of hubconf.py",
    "model.checkpoint.resample": "model.checkpoint.convert=resample does the same",
    "models.limit": "job.show=all prints all models that models.query finds",
    "export.overlap": "it is computed from the positions of the boxes",
    "probe.split=holdout": "it is the default; probe.test_share=0.3 sets how many rows are tested",
    "probe.split=kfold": "probe.folds=5 selects it",
    "probe.split=column": "probe.split=NAME names the column, probe.split=FILE.csv the file",
    "probe.split_file": "probe.split=FILE.csv names the file",
    "probe.split_column": "probe.split=NAME names the column",
    "probe.validation_share": "a fifth of the training rows are for validation; those of your own "
    "are named by probe.split",
    "probe.temperature": "it is 0.07",
    "probe.draws": "probe.seeds is also the number of random choices",
    "probe.clip_norm": "gradients are clipped to a norm of 1",
    "export.push": "`hf upload me/photos DIR --repo-type dataset` of huggingface_hub uploads the "
    "folder of an export",
}
"""Option or choice that featx had -> what replaces it."""


def gone(name: str) -> str:
    """Sentence that says what replaces an option or a choice that featx had; '' for all others."""
    reason = _REPLACED.get(name) or _REPLACED.get(name.rpartition(".")[0])
    return f"{name} is gone: {reason}." if reason else ""


def counted(count: int, one: str, many: str | None = None) -> str:
    """Number with its noun: '1 row', '2 rows'; the plural has an s if `many` is not given."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def first_names(names: Sequence[str], most: int) -> str:
    """First names of a list, and how many more there are: 'a, b and 3 more'."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


def one_line(error: BaseException) -> str:
    """Message of an exception of other code on one line of at most 300 characters, or its type."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def first_line(error: BaseException) -> str:
    """First line of the message of an exception of other code, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def exit_text(error: SystemExit) -> str:
    """Say which line of other code ends the process; its exit code may be 0."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"line {frame.lineno} of {frame.filename} ends the process with "
        f"sys.exit({'' if error.code is None else repr(error.code)}). Code that featx calls, "
        "such as that of a model, must return or raise an exception; a script that is imported "
        'guards such calls by if __name__ == "__main__".'
    )


def nearest(name: str, known: Iterable[str], count: int = 5) -> str:
    """Clause with at most `count` similar known names, to end a message about an unknown name; may
    be empty.

    Names are similar if they are spelled alike, or if their last parts (after the last dot) have
    a word in common: `fold` and `fold_batchnorm`, `maps` and `attribute.feature_map_layer`. Names
    of the same group (before the last dot) come first; all of them if none is similar.
    """
    if sentence := gone(name):
        return f" {sentence}"
    known = list(dict.fromkeys(known))
    meant = [each for each, words in _ALSO_CALLED.items() if name.lower() in words.split()]
    spelled = (spelling for each in meant for spelling in (each, each.replace(".", "_")))
    if also := [word for word in dict.fromkeys(spelled) if word in known]:
        return f" Nearest: {', '.join(also)}."
    group, dot, last = name.rpartition(".")
    siblings = {}
    for each in known:
        its_group, _, last_of_each = each.rpartition(".")
        if dot and its_group == group:
            siblings[last_of_each] = each
    ranks = {each: _words_in_common(last, each) for each in known}
    # The group itself makes any two of its names look alike, so only the last parts are compared.
    if siblings:
        found = [siblings[each] for each in difflib.get_close_matches(last, siblings, cutoff=0.65)]
        found += [each for each in siblings.values() if ranks[each]]
        found = found or list(siblings.values())
    else:
        found = difflib.get_close_matches(name, known, n=count, cutoff=0.8)
    depth = name.count(".")
    found += sorted(
        (each for each in known if ranks[each]),
        key=lambda each: (-ranks[each], abs(each.count(".") - depth), len(each)),
    )
    if not found:
        found = difflib.get_close_matches(name, known, n=count, cutoff=0.5)
    if not found:
        found = [each for each in known if name.lower() in each.lower()]
    shown = list(dict.fromkeys(found))[:count]
    return f" Nearest: {', '.join(shown)}." if shown else ""


def _words_in_common(last: str, name: str) -> int:
    """Rank of the best pair of words of two names: 2 if equal, 1 if one starts the other, or 0."""
    last_of_name = name.rpartition(".")[2]
    words, others = _words(last), _words(last_of_name)
    if words & others or last == last_of_name:
        return 2
    return int(any(a.startswith(b) or b.startswith(a) for a in words for b in others))


def _words(name: str) -> set[str]:
    """Words of a name in lower case and the singular; short words and numbers do not count."""
    found = (word.removesuffix("s") for word in re.findall("[a-z]+", name.lower()))
    return {word for word in found if len(word) >= 3}
