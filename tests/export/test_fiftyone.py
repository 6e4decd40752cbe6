"""export.format=fiftyone: samples have what the store and the results of other jobs say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from csv_rows import csv_rows
from format_readers import READERS
from PIL import Image
from tiny_model import extract, run_job, write_image

import featx
from featx.errors import ConfigError, DataError, StoreError, StoreMismatchError
from featx.store import read_result, result_json

pytestmark = pytest.mark.usefixtures("in_tmp_path")

JOBS = ("probe", "outliers", "mislabelled", "duplicates")


def write_photos(root: Path) -> None:
    """Two classes of other colours, with one label that is wrong and two copies of an image."""
    rng = np.random.default_rng(0)
    for i in range(40):
        kind = ("cat", "dog")[i % 2]
        squares = rng.integers(0, 100, (4, 4, 3), dtype=np.uint8)
        squares[:, :, 0 if kind == "cat" else 2] += 150
        path = root / ("dog" if i == 10 else kind) / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(squares.repeat(12, 0).repeat(12, 1)).save(path)
    shutil.copy(root / "cat/00.png", root / "cat/90.png")
    (root / "cat/99.png").write_bytes(b"no image")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with photos, their store with the results of all jobs, and its export."""
    root = tmp_path_factory.mktemp("made")
    write_photos(root / "photos")
    store = str(root / "store")
    layers = ["pool", "conv"]
    extract(root / "photos", layers=layers, reduce="avg", max_failures=1, out=store)
    options: dict[str, Any] = {"store": store, "device": "cpu"}
    run_job("probe", probe={"l2": 0.1}, **options)
    for job in JOBS[1:]:
        run_job(job, layers="pool", **options)
    assert run_job("export", store=store, export={"format": "fiftyone"}) == 0
    return root


@pytest.fixture
def store(made: Path, in_tmp_path: None) -> featx.FeatureStore:
    """The store, copied to where a test may change it."""
    shutil.copytree(made / "store", "store")
    return featx.open("store")


def export(**keys: Any) -> Path:
    options = {"format": "fiftyone", **keys.pop("export", {})}
    assert run_job("export", store="store", export=options, out="out", **keys) == 0
    return Path("out")


def samples_of(out: Path) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = json.loads((out / "samples.json").read_text())["samples"]
    return samples


def lines_of(path: Path, **values: str) -> dict[str, dict[str, str]]:
    return {line["key"]: line for line in csv_rows(path, **values)}


def test_samples_have_what_the_jobs_have_found(made: Path) -> None:
    store, samples = featx.open(made / "store"), samples_of(made / "store/export-fiftyone")
    assert [sample["key"] for sample in samples] == store.keys[store.ok].tolist()
    outliers = lines_of(made / "store/outliers/outliers.csv")
    judged = lines_of(made / "store/mislabelled/mislabelled.csv")
    groups = lines_of(made / "store/duplicates/duplicates.csv")
    probe = json.loads((made / "store/probe.json").read_text())
    predictions = made / "store/probe/predictions.csv"
    tested = lines_of(predictions, layer=probe["layer"], split="test")
    assert 0 < len(tested) < len(samples)
    shown = json.loads((made / "store/outliers/outliers.json").read_text())
    first = {one["key"] for name in ("farthest", "farthest_in_class") for one in shown[name]}
    assert len(first) >= 3
    for sample in samples:
        key = sample["key"]
        assert sample["filepath"] == str(made / "photos" / key)
        assert sample["ground_truth"]["label"] == key.partition("/")[0]
        assert sample["outlier_distance"] == float(outliers[key]["distance"])
        assert sample["label_probability"] == float(judged[key]["p_label"])
        crossed = sample["cross_validated"]
        assert crossed["label"] == judged[key]["predicted"]
        assert crossed["confidence"] == float(judged[key]["p_predicted"])
        if key in tested:
            assert sample["prediction"]["label"] == tested[key]["predicted"]
            assert sample["prediction"]["confidence"] == float(tested[key]["p_predicted"])
        else:
            assert "prediction" not in sample
        assert sample.get("duplicate_group") == (
            int(groups[key]["group"]) if key in groups else None
        )
        tags = {
            "outlier": key in first,
            "mislabelled": judged[key]["doubtful"] == "yes",
            "near-duplicate": key in groups,
        }
        assert sample["tags"] == [name for name, is_set in tags.items() if is_set]
    by_key = {sample["key"]: sample for sample in samples}
    assert "mislabelled" in by_key["dog/10.png"]["tags"]
    twins = by_key["cat/00.png"], by_key["cat/90.png"]
    assert twins[0]["duplicate_group"] == twins[1]["duplicate_group"]
    identifiers = {
        value["_id"]["$oid"]
        for sample in samples
        for value in (sample, *sample.values())
        if isinstance(value, dict) and "_id" in value
    }
    assert len(identifiers) == 3 * len(samples) + len(tested)


def test_without_results_the_export_says_which_jobs_are_missing(
    store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree("store/outliers")
    result = json.loads(Path("store/mislabelled/mislabelled.json").read_text())
    del result["sha256"]
    Path("store/mislabelled/mislabelled.json").write_text(json.dumps({**result, "rows_sha256": ""}))
    out = export(layers="pool")
    said = capsys.readouterr().err
    assert "job=outliers, mislabelled, which has not run on this store" in said
    assert "mislabelled.json belongs to another state of the store: run job=mislabelled" in said
    columns = READERS["fiftyone"](out).columns
    assert "duplicate_group" in columns
    assert not {"outlier_distance", "cross_validated", "label_probability"} & {*columns}
    before = (out / "samples.json").read_bytes()
    assert export(layers="pool") == out  # complete: nothing is done
    assert (out / "samples.json").read_bytes() == before
    run_job("outliers", store="store", layers="pool", device="cpu")
    with pytest.raises(StoreMismatchError, match="results of jobs"):
        export(layers="pool")
    assert "outlier_distance" in READERS["fiftyone"](export(layers="pool", overwrite=True)).columns


def test_predictions_of_another_column_are_left_out(
    store: featx.FeatureStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (Path("store/probe.json"), Path("store/mislabelled/mislabelled.json")):
        result = read_result(path)
        result.get("split", result)["label_column"] = "colour"
        path.write_bytes(result_json(result, 1))
    columns = READERS["fiftyone"](export(layers="pool")).columns
    assert "outlier_distance" in columns
    assert not {"prediction", "cross_validated", "label_probability"} & {*columns}
    said = capsys.readouterr().err
    assert said.count("is left out: it predicts the column colour") == 2


def test_images_that_are_no_files_are_copied_and_arrays_become_png() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 40, 40, 3), np.uint8)
    with h5py.File("images.h5", "w") as file:
        file["images"] = pixels
        file["labels"] = ["a", "b"] * 3
    data = {"name": "hdf5", "root": "images.h5", "dataset": "images", "label_column": "labels"}
    extract(data, layers=["pool"], reduce="flatten")
    out = export()
    samples = samples_of(out)
    assert [sample["filepath"] for sample in samples] == [f"data/{i:09d}.png" for i in range(6)]
    for i, sample in enumerate(samples):
        assert np.array_equal(np.asarray(Image.open(out / sample["filepath"])), pixels[i])
    assert [sample["ground_truth"]["label"] for sample in samples] == ["a", "b"] * 3


def test_an_image_whose_name_is_no_utf8_is_copied(made: Path) -> None:
    shutil.copytree(made / "photos/cat", "photos/cat")
    encoded = Path("photos/cat/00.png").read_bytes()
    Path(os.fsdecode(b"photos/cat/lat\xe9in.png")).write_bytes(encoded)
    extract("photos", layers=["pool"], reduce="flatten", max_failures=1)
    out = export()
    for sample in samples_of(out):
        path = out / sample["filepath"]
        assert path.is_absolute() or path.parent == out / "data"
        assert path.is_file()
    copied = [sample for sample in samples_of(out) if sample["filepath"].startswith("data/")]
    assert [sample["key"] for sample in copied] == ["cat/lat\\xe9in.png"]
    assert (out / copied[0]["filepath"]).read_bytes() == encoded


def test_columns_are_fields(photos: Path) -> None:
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))[:4]
    lines = [
        f"{name},{i},{'' if i == 1 else i / 2},t{i},{i % 2 == 0},{i},{10 + i},{20 + i}"
        for i, name in enumerate(names)
    ]
    Path("t.csv").write_text("\n".join(["path,age,score,a b,flag,row,a_b,_id", *lines]))
    columns = ["age", "score", "a b", "flag", "row", "a_b", "_id"]
    extract(
        {"name": "table", "root": "t.csv", "image_root": str(photos), "columns": columns},
        layers=["pool"],
        reduce="flatten",
    )
    found = READERS["fiftyone"](export())
    assert found.columns["age"] == found.columns["column_row"] == [0, 1, 2, 3]
    assert found.columns["score"] == [0.0, None, 1.0, 1.5]
    assert found.columns["a_b"] == ["t0", "t1", "t2", "t3"]
    assert found.columns["a_b_"] == [10, 11, 12, 13]
    assert found.columns["id_"] == [20, 21, 22, 23]
    assert found.columns["flag"] == [True, False, True, False]
    assert found.rows == [0, 1, 2, 3]


def test_what_a_sample_cannot_hold_is_refused(photos: Path) -> None:
    data = {"name": "folder", "root": str(photos), "views": ["hflip"]}
    extract(data, layers={"conv": "none", "pool": "flatten"})
    with pytest.raises(
        ConfigError, match="a sample of FiftyOne holds vectors; rows of conv are maps"
    ):
        export()
    with pytest.raises(ConfigError, match=r"views of images .* fiftyone holds images as they"):
        export(layers="pool")
    extract(photos, layers=["pool"], reduce="flatten", overwrite=True)
    shutil.move(photos, "moved")
    with pytest.raises(DataError, match=r"its image cannot be read now|no such folder"):
        export()
    data = {"name": "folder", "root": "moved"}
    assert samples_of(export(data=data))[0]["filepath"].startswith(str(Path("moved").absolute()))
    shutil.move("moved", "again")
    with pytest.raises(StoreMismatchError, match=r"folder of the images: .*moved, now .*again"):
        export(data={"name": "folder", "root": "again"})


def test_one_image_of_many_that_has_changed_is_found() -> None:
    Path("many").mkdir()
    for number in range(70):
        write_image(Path(f"many/{number:02d}.png"), number)
    extract("many", layers=["pool"], reduce="flatten")
    sampled = np.linspace(0, 69, 64).astype(int)
    other = min({*range(70)} - {*sampled.tolist()})
    write_image(Path(f"many/{other:02d}.png"), 1000)
    with pytest.raises(DataError, match=f"{other:02d}.png has changed since its row was computed"):
        export()


def test_without_the_table_of_a_job_the_export_says_so(store: featx.FeatureStore) -> None:
    Path("store/outliers/outliers.csv").unlink()
    with pytest.raises(StoreError, match=r"outliers\.csv is missing: run job=outliers again"):
        export(layers="pool")


@pytest.mark.parametrize("job", ["outliers", "mislabelled", "duplicates"])
def test_the_table_of_another_run_of_a_job_is_refused(store: featx.FeatureStore, job: str) -> None:
    """As a kill between the two files leaves them."""
    result = Path(f"store/{job}/{job}.json")
    of_pool = result.read_bytes()
    assert run_job(job, store="store", layers="conv") == 0
    result.write_bytes(of_pool)
    message = rf"{job}\.csv is not the table that belongs to {job}\.json: .* Run job={job} again"
    with pytest.raises(StoreError, match=message):
        export(layers="pool")


def test_predictions_of_another_run_of_the_probe_are_refused(store: featx.FeatureStore) -> None:
    with Path("store/probe/predictions.csv").open("a") as file:
        file.write("\n")
    with pytest.raises(StoreError, match=r"probe\.json names are missing or were changed: run job"):
        export(layers="pool")


def test_fiftyones_importer_reads_the_export(made: Path) -> None:
    """With a Python that has fiftyone and mongomock, which FEATX_FIFTYONE_PYTHON names."""
    python = os.environ.get("FEATX_FIFTYONE_PYTHON", sys.executable)
    command = [python, "-c", "import fiftyone, mongomock"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(
            "fiftyone and mongomock are not installed; FEATX_FIFTYONE_PYTHON names a Python"
        )
    out = made / "store/export-fiftyone"
    script = Path(__file__).with_name("fiftyone_import.py")
    done = subprocess.run([python, script, out], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    store, samples = featx.open(made / "store"), samples_of(out)
    assert found["classes"] == ["cat", "dog"]
    assert found["schema"]["pool"] == "VectorField"
    assert found["schema"]["outlier_distance"] == "FloatField"
    assert found["tags"] == {
        name: count
        for name in ("outlier", "mislabelled", "near-duplicate")
        if (count := sum(name in sample["tags"] for sample in samples))
    }
    for imported, sample in zip(found["samples"], samples, strict=True):
        assert imported["id"] == sample["_id"]["$oid"]
        for layer in store.layers:
            row = store[layer][sample["row"]]
            assert imported[layer] == {"dtype": row.dtype.name, "values": row.ravel().tolist()}
        for name in ("filepath", "tags", "key", "row", "outlier_distance", "label_probability"):
            assert imported[name] == sample[name]
        assert imported["duplicate_group"] == sample.get("duplicate_group")
        for name in ("ground_truth", "prediction", "cross_validated"):
            label = sample.get(name)
            expected = label and {key: label.get(key) for key in ("label", "confidence")}
            assert imported[name] == expected
