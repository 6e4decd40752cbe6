"""Folders as transformers writes them: config.json, safetensors, the config of the processor.

The files are read here, and never by transformers: a folder may name code (`auto_map`), files of
other folders, adapters and pickles, and none of these is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from featx.errors import ModelError, WeightsError, counted, first_line
from featx.models.catalogue import hint_elsewhere
from featx.models.hugging_face import HUB_NAME, read_json, resolve_hub

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Files of the image processor; the first may hold it below the key `image_processor`."""

_TOKENIZER = "tokenizer_config.json"

VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model")
"""Files with the tokens of a tokenizer, one of which a folder with texts has."""

_DOWNLOADED = (
    *(CONFIG, *PROCESSORS, "*.safetensors", INDEX),
    *(_TOKENIZER, *VOCABULARIES, "merges.txt", "special_tokens_map.json"),
)
"""Files of a model of the Hugging Face Hub that are downloaded."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.h5", "*.msgpack")

_IGNORED = (
    "_attn_implementation",
    "attn_implementation",
    "_experts_implementation",
    "experts_implementation",
    "dtype",
    "fusion_config",
    "name_or_path",
    "_name_or_path",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "transformers_weights",
)
"""Entries of config.json that choose kernels, dtypes, files or outputs, or name the version that
wrote it, not the model. Kernels may be code of the hub."""


def find_folder(name: str) -> Path:
    """Return the folder of a model; a model of the Hugging Face Hub is downloaded."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise WeightsError(
            f"model.name={name} is a file; expected the folder with {CONFIG} and {WEIGHTS}."
        )
    if HUB_NAME.fullmatch(name):
        return _download(name)
    raise WeightsError(
        f"model.name={name}: there is no such folder (looked in {Path.cwd()}). Expected a folder "
        f"with {CONFIG}, {WEIGHTS} and {PROCESSORS[1]}, as save_pretrained of transformers writes "
        f"it, or owner/model of the Hugging Face Hub.{hint_elsewhere(name)}"
    )


def _download(name: str) -> Path:
    """Return the folder of a model of the hub, from its cache or from the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        if (folder / CONFIG).is_file() and any(folder.glob("*.safetensors")):
            return folder
    except LocalEntryNotFoundError:
        pass
    try:
        resolve_hub()
        return Path(snapshot_download(name, allow_patterns=[*_DOWNLOADED]))
    except (OSError, HfHubHTTPError, HFValidationError, ValueError) as error:
        reason = first_line(error)
        raise WeightsError(
            f"model.name={name}: there is no such folder (looked in {Path.cwd()}), the model is "
            f"not in {HF_HUB_CACHE}, and it cannot be downloaded from {ENDPOINT} ({reason}). On a "
            f"machine with internet access run `hf download {name} --local-dir FOLDER`, copy the "
            f"folder here, and give its path as model.name.{hint_elsewhere(name)}"
        ) from error


def read_config(folder: Path) -> dict[str, object]:
    """Read config.json, without the entries that are no part of the model."""
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} holds an adapter (adapter_config.json) of another model. Merge the two with "
            "merge_and_unload of peft, and save the result."
        )
    if not (folder / CONFIG).is_file():
        other = (folder / "open_clip_config.json").is_file()
        raise WeightsError(
            f"model.name={folder}: there is no {CONFIG} in this folder. "
            + (
                "It is one of open_clip: model=open_clip."
                if other
                else f"Expected {CONFIG}, {WEIGHTS} and {PROCESSORS[1]}, as save_pretrained of "
                "transformers writes them."
            )
        )
    config = read_json(folder / CONFIG)
    refuse_code(folder)
    if "model_type" not in config:
        raise ModelError(
            f"{folder / CONFIG} has no model_type, so it is not of transformers."
            + (
                f" It is a model of timm: model=timm model.name=local-dir:{folder}"
                if "architecture" in config
                else ""
            )
        )
    if "quantization_config" in config:
        raise ModelError(
            f"{folder} is quantised (quantization_config in {CONFIG}). featx needs the weights in "
            "float32, float16 or bfloat16."
        )
    return _without(config, _IGNORED)


def refuse_code(folder: Path) -> None:
    """Refuse a folder whose files name Python code (`auto_map`); nothing of it is imported."""
    for name in (CONFIG, *PROCESSORS, _TOKENIZER):
        file = folder / name
        if file.is_file() and _has_key(read_json(file), "auto_map"):
            raise ModelError(
                f"{file} names Python code that comes with the model (auto_map), and featx runs no "
                "such code. If you trust it, load the model in a function of your own: "
                "model=custom model.factory=package.module:factory."
            )


def _has_key(value: object, key: str) -> bool:
    if isinstance(value, Mapping):
        return key in value or any(_has_key(part, key) for part in value.values())
    return isinstance(value, list) and any(_has_key(part, key) for part in value)


def _without(config: Mapping[str, object], names: tuple[str, ...]) -> dict[str, object]:
    return {
        key: _without(value, names) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in names
    }


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a folder, from one file or from the parts that its index names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        try:
            state |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{file} cannot be read ({error}). It has {file.stat().st_size} bytes: compare the "
                "size with that of the original, and copy or download it anew."
            ) from error
    _check_dtypes(state, folder)
    return state


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        parts = read_json(folder / INDEX).get("weight_map")
        names = sorted(set(map(str, parts.values()))) if isinstance(parts, dict) else []
        # A name with a slash would lead out of the folder.
        missing = [n for n in names if Path(n).name != n or not (folder / n).is_file()]
        if missing or not names:
            raise WeightsError(
                f"{folder / INDEX} names {counted(len(names), 'file')}, of which "
                f"{', '.join(missing) or 'none'} {'is' if len(missing) < 2 else 'are'} missing in "
                "the folder. Copy or download the whole folder."
            )
        return [folder / name for name in names]
    pickled = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickled:
        raise WeightsError(
            f"the weights of {folder} are pickled ({', '.join(pickled[:3])}), and unpickling can "
            f"run code. Expected {WEIGHTS}. If you trust them, convert them once: "
            "transformers.AutoModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
        )
    raise WeightsError(f"model.name={folder}: there is no {WEIGHTS} in this folder.")


def _check_dtypes(state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Refuse quantised values, which need a scale that the names do not give."""
    plain_dtypes = ("float64", "float32", "float16", "bfloat16", "int64", "bool")
    dtypes = {name: str(x.dtype).removeprefix("torch.") for name, x in state.items()}
    quantised = [
        f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype not in plain_dtypes
    ]
    if quantised:
        raise WeightsError(
            f"the weights of {folder} are quantised: {counted(len(quantised), 'tensor')} "
            f"({', '.join(quantised[:3])}). Give weights in float32, float16 or bfloat16."
        )
