"""job=verify: compare a store with its checksums and with its images, and repair it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

from featx.analysis import (
    ImagesReport,
    ReproducibilityReport,
    check_images,
    config_of_run,
    engine_spec,
    recheck_rows,
)
from featx.base import facts, size_text
from featx.config import Config, VerifyConfig, from_saved
from featx.errors import ConfigError, FeatxError, StoreError, counted
from featx.jobs.base import JOBS, Input, Job, code_options, print_summary
from featx.pipeline import (
    check_extraction,
    rows_of_two_images,
    run_extraction,
    unknown_images_text,
)
from featx.storage import is_url
from featx.store import (
    DamageRecord,
    DamageReport,
    Manifest,
    check_store,
    layout,
    load_manifest,
    missing_parts,
    pack_store,
    repair_files,
    runs_to_extract,
)

EXIT_DAMAGED = 2
EXIT_INCOMPLETE = 1


def run(config: Config, config_yaml: str) -> int:
    """Check everything in the store and print the result."""
    root = config.store_path()
    if root.is_file() and (config.verify.reextract_rows or config.verify.repair):
        raise ConfigError(
            f"store={root} is a file; verify.reextract_rows and verify.repair need the store's "
            "folder."
        )
    report = check_store(root)
    summary = report.as_dict()
    if config.verify.repair and (not report.complete or DamageRecord.read(root).is_due):
        report, summary["repaired"] = _repair(config, report)
        summary |= report.as_dict()
    images = ImagesReport(
        not_compared="a file alone is no store's folder, which says where they are"
    )
    if not report.has_sound_rows:
        images = ImagesReport(not_compared="the store is damaged")
    elif root.is_dir() or is_url(root):
        images = check_images(config, root, _manifest(root))
    summary["images"] = asdict(images)
    reextracted = None
    if config.verify.reextract_rows and report.has_sound_rows:
        reextracted = recheck_rows(config, root, _manifest(root), config.verify.reextract_rows)
        summary["reextracted"] = asdict(reextracted)
    rows = _facts(report, images, reextracted)
    conclusion = _conclusion(report, images, reextracted)
    print_summary(config, summary, f"{facts(rows)}\n{conclusion}")
    if report.damages or images.changed or (reextracted is not None and reextracted.different):
        return EXIT_DAMAGED
    return EXIT_INCOMPLETE if report.missing else 0


def _repair(config: Config, report: DamageReport) -> tuple[DamageReport, dict[str, object]]:
    """Repair the files of the store, extract the rows that are lost, and check the store again."""
    root = report.root
    # Decided before anything is written: a store that cannot be repaired stays as it is, and its
    # sound rows can be read.
    for run in runs_to_extract(report):
        manifest = _manifest(root)
        run_config = config_of_run(config, root, manifest, run)
        check_extraction(run_config, run.header.config, engine_spec(run_config.job.name), manifest)
    is_to_pack = not is_url(root) and ((root / layout.PACKED).exists() or _awaits_packing(root))
    runs = repair_files(report)
    manifest = _manifest(root)
    missing_of_run = missing_parts(root, manifest)
    if not runs and not (root / layout.LISTING).exists():
        runs = [manifest.runs[-1]]  # no file has a copy of the listing: the images are listed again
    for run in runs:
        run_config = config_of_run(config, root, manifest, run)
        spec = engine_spec(run_config.job.name)
        run_extraction(run_config, run.header.config, spec, known_rows_only=True)
    is_complete = is_to_pack and not missing_parts(root, manifest)
    # Rows whose layers are of two images stay in parts, as the run says that computes them.
    if is_complete and not rows_of_two_images(root, manifest).size:
        pack_store(root)
    row_ranges = {(part.start, part.stop) for _, parts in missing_of_run for part in parts}
    rows = sum(stop - start for start, stop in row_ranges)
    files = sorted({damage.path.name for damage in report.damages})
    return check_store(root), {"files": files, "rows": rows}


def _awaits_packing(root: Path) -> bool:
    """Return whether a repair of a packed store was killed before it packed the store again."""
    was_packed = layout.PACKED in DamageRecord.read(root).files
    return was_packed and from_saved(_manifest(root).runs[-1].header.config).pack is not False


def _code_of(root: Path) -> str | None:
    """Return the options that name the code of the model of a store; None if it needs none."""
    with contextlib.suppress(FeatxError):
        if root.is_dir() or is_url(root):
            return from_saved(_manifest(root).runs[-1].header.config).model.code
    return None


def _manifest(root: Path) -> Manifest:
    manifest, _ = load_manifest(root)
    if manifest is None:
        raise StoreError(f"{root / layout.MANIFEST} has disappeared while the store was checked.")
    return manifest


def _facts(
    report: DamageReport, images: ImagesReport, reextracted: ReproducibilityReport | None
) -> list[tuple[str, str]]:
    rows = [
        ("store", str(report.root)),
        ("rows", str(report.num_rows)),
        (
            "compared",
            f"{counted(report.num_files, 'file')}, {counted(report.num_chunks, 'chunk')}, "
            f"{size_text(report.num_bytes)} with their checksums",
        ),
    ]
    if report.missing:
        parts = counted(len(report.missing), "part")
        rows.append(("missing", f"{parts}: {_first(report.missing, 3)}"))
    if report.damages:
        lines = [f"{damage.path.name}: {damage.what}" for damage in report.damages[:20]]
        if more := len(report.damages) - len(lines):
            lines.append(f"and {more} more")
        rows.append(("damaged", "\n".join(lines)))
    rows.append(("images", _images_text(images)))
    if reextracted is not None:
        text = (
            f"{counted(reextracted.rows, 'row')} extracted again: "
            f"{reextracted.identical} identical, {reextracted.close} close, "
            f"{len(reextracted.different)} different"
        )
        rows.append(("reextracted", "\n".join([text, *reextracted.different[:20]])))
    return rows


def _first(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _images_text(images: ImagesReport) -> str:
    """Describe which images have changed, and which were not compared."""
    if images.not_compared is not None:
        return f"not compared: {images.not_compared}"
    same = images.compared - len(images.changed)
    lines = [f"unchanged for {counted(same, 'row')} (bytes of {images.read} read)"]
    for keys, state in (
        (images.changed, "changed since"),
        (images.gone, "missing or empty now"),
    ):
        if keys:
            lines.append(f"{state} for {counted(len(keys), 'row')}: {_first(keys, 10)}")
    if images.unknown:
        lines.append(unknown_images_text(images.unknown))
    return "\n".join(lines)


def _conclusion(
    report: DamageReport, images: ImagesReport, reextracted: ReproducibilityReport | None
) -> str:
    """Return one sentence on the state of the store, and what to do."""
    if not report.has_sound_rows and report.root.is_file():
        return "The file is damaged. In the folder of its store verify.repair=true repairs it."
    if not report.has_sound_rows:
        code = _code_of(report.root)
        options = "verify.repair=true" if code is None else f"verify.repair=true {code}"
        return (
            f"The store is damaged. {options} extracts the rows of its damaged chunks again "
            "and keeps all others."
        )
    if images.changed:
        return (
            "Images have changed since their rows were computed: the command of the run with "
            "refresh=true computes those rows anew."
        )
    if reextracted is not None and reextracted.different:
        return "Rows differ from their images: were images, weights or libraries changed?"
    if report.damages:
        return (
            "The rows are sound. The job that made a damaged result, such as job=probe, writes it "
            "again; verify.repair=true sets it aside."
        )
    if report.missing:
        return "What is there is sound; the command that started the store resumes it."
    return "The store is complete and sound."


def _reads_with(config: Config) -> Collection[str]:
    """Return the options that say how rows are extracted again, if they are."""
    options = list(code_options(config))
    if config.verify.reextract_rows or config.verify.repair:
        options += ["device", "reduce.name", "reduce.stats"]
    if config.verify.reextract_rows:
        options.append("seed")
    return options


JOBS.register(
    Job(
        "verify",
        "Compare a store with its checksums and its images, and repair it.",
        VerifyConfig,
        run=run,
        input=Input.STORE_OR_OUT,
        reads=("job.json", "data.name", "data.root"),
        why="it reads the store that `store` or `out` names, and its images",
        reads_with=_reads_with,
    )
)
