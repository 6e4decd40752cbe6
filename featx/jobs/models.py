"""job=models: the models that can be named, with their figures, and advice for other names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from featx.base import Table, command_text, facts, size_text
from featx.config import Config, ModelsConfig
from featx.errors import ConfigError, counted, nearest
from featx.jobs.base import JOBS, Input, Job, print_summary
from featx.models import (
    LIBRARIES,
    RECOMMENDED,
    CatalogueEntry,
    WeightsOnDisk,
    hint,
    installed_version,
    listed_models,
    read_catalogue,
    search_families,
    search_models,
)

_NUM_SHOWN = 20
"""Number of models that are printed without job.show=all."""

_NO_FIGURE = "-"
"""Text of a figure that is not known."""


def run(config: Config, config_yaml: str) -> int:
    """Print recommended models, or the models that match a query; returns the exit code 0."""
    disk = WeightsOnDisk()
    models = listed_models(disk.transformers_models())
    query, show = config.models.query, config.job.show
    if show == "local":
        models = [entry for entry in models if disk.size_of(entry)]
    if query is not None:
        print_summary(config, *_search(query, show, models, disk))
    elif show == "local":
        text = counted(len(models), "model has", "models have") + " weights on this machine"
        table = _table(models, disk) if models else None
        summary = {"models": [_as_json(entry, disk) for entry in models]}
        print_summary(config, summary, text, table, _notes(models) or None)
    else:
        print_summary(config, *_overview(models, disk))
    return 0


def _overview(models: Sequence[CatalogueEntry], disk: WeightsOnDisk) -> Iterator[Any]:
    """Yield the libraries and the recommended models as JSON types, and sections that show them."""
    libraries = {library.name: _library_text(library.name, models) for library in LIBRARIES}
    libraries = {name: text for name, text in libraries.items() if text}
    entry_of_option = {entry.option: entry for entry in models}
    entries = [entry_of_option[option] for option in RECOMMENDED if option in entry_of_option]
    yield {
        "libraries": libraries,
        "recommended": [
            {**_as_json(entry, disk), "when": RECOMMENDED[entry.option]} for entry in entries
        ],
    }
    yield list(libraries.items())
    yield _table(entries, disk)
    yield _notes(entries) or None
    yield [
        ("search", command_text("job=models", "models.query=dino")),
        ("layers", command_text("job=layers", "model=resnet50")),
        ("when", "docs/backbones.md says which model fits which task"),
    ]


def _library_text(name: str, models: Sequence[CatalogueEntry]) -> str:
    """Return how many models of a library can be named; '' for a library that has no names."""
    entries = [entry for entry in models if entry.library == name]
    if name == "transformers":
        text = "folders and models of the Hugging Face Hub: model=transformers model.name=NAME"
        return f"{text}; {len(entries)} on this machine"
    if not entries:
        extra = LIBRARIES.get(name).extra
        return f'not installed: pip install "featx[{extra}]"' if extra else ""
    tagged = [entry for entry in entries if entry.tag]
    text = counted(len({entry.name for entry in entries}), "architecture")
    return f"{text}, {len(tagged)} sets of weights" if tagged else text


def _search(
    query: str, show: str | None, models: Sequence[CatalogueEntry], disk: WeightsOnDisk
) -> Iterator[Any]:
    """Yield the models that match a query as JSON types, and sections that show them."""
    names = {entry.name for entry in models}
    matches, families = search_models(query, models), search_families(query)
    hint_text = "" if query in names else hint(query).strip()
    yield {
        "query": query,
        "hint": hint_text,
        "families": families,
        "models": [_as_json(entry, disk) for entry in matches],
    }
    yield facts([("", hint_text)]).strip() if hint_text else None
    notes = []
    if families:
        text = (
            f"{'family' if len(families) == 1 else 'families'} {', '.join(families)}: "
            "model=transformers model.name=FOLDER, a folder of save_pretrained, or owner/model of "
            "the Hugging Face Hub"
        )
        notes.append(("transformers", text))
    if not matches:
        near = "" if hint_text or families else nearest(query, sorted(names))
        kind = "listed model" if families else "model"
        kind = "model with weights on this machine" if show == "local" else kind
        yield f"No {kind} matches {query!r}.{near}"
        yield notes or None
        return
    count = counted(len(matches), "model matches", "models match")
    first_matches = matches if show is not None else matches[:_NUM_SHOWN]
    is_cut = len(first_matches) < len(matches)
    more = f"; the first {_NUM_SHOWN} of them, all with job.show=all" if is_cut else ""
    yield f"{count} {query!r}{more}"
    yield _table(first_matches, disk)
    yield [*_notes(first_matches), *notes] or None


def _table(entries: Sequence[CatalogueEntry], disk: WeightsOnDisk) -> Table:
    rows = []
    for entry in entries:
        height, width = entry.input_size or (0, 0)
        side = "" if not height else str(height) if height == width else f"{height}x{width}"
        millions = "" if entry.parameters is None else f"{entry.parameters / 1e6:.1f} M"
        num_bytes = disk.size_of(entry)
        has_weights = entry.library == "packaged" or bool(entry.tag)
        size_on_disk = size_text(num_bytes) if num_bytes else "no" if has_weights else ""
        licence = entry.licence.removesuffix("-license")
        figures = (str(entry.width or ""), side, millions, size_on_disk, licence)
        rows.append((entry.option, entry.library, *(text or _NO_FIGURE for text in figures)))
    header = ("model=", "library", "embedding", "input", "parameters", "on disk", "licence")
    return Table(header, rows, left=2)


def _as_json(entry: CatalogueEntry, disk: WeightsOnDisk) -> dict[str, object]:
    """Return a model in JSON types; a figure that is not known is null."""
    return {
        "model": entry.option,
        "library": entry.library,
        "name": entry.name,
        "weights": entry.tag or None,
        "width": entry.width,
        "input_size": entry.input_size,
        "parameters": entry.parameters,
        "licence": entry.licence or None,
        "bytes_on_disk": disk.size_of(entry),
    }


def _notes(entries: Sequence[CatalogueEntry]) -> list[tuple[str, str]]:
    """Return remarks about the figures of some models."""
    rows = []
    libraries_in_file = {entry.library for entry in entries if entry.in_file}
    for library, version in read_catalogue().versions.items():
        if library not in libraries_in_file:  # it may not be installed
            continue
        installed = installed_version(library)
        if installed != version:
            rows.append(("figures", f"of {library} {version}; installed is {installed}"))
    if "open_clip" in libraries_in_file:
        rows.append(("open_clip", "parameters are those of the image tower"))
    if any(not entry.in_file for entry in entries):
        rows.append((_NO_FIGURE, "not known here; job=layers model=NAME measures it"))
    return rows


def _check(config: Config) -> None:
    if config.job.show == "all" and config.models.query is None:
        raise ConfigError("job.show=all has an effect with models.query only.")


JOBS.register(
    Job(
        "models",
        "Search the models that can be named: embedding, input, parameters, weights on disk.",
        ModelsConfig,
        run=run,
        input=Input.NOTHING,
        reads=("job.json",),
        shows=("all", "local"),
        why="it looks for models, and computes nothing",
        check=_check,
    )
)
