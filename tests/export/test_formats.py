"""Every format of job=export gives back the store's rows, read by its own library."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_readers import READERS
from made_store import MadeRun, make_run
from tiny_model import MODEL, extract, job_config, run_job, write_image

import featx
from featx.errors import ConfigError, DataError, MissingExtraError, StoreError, StoreMismatchError
from featx.export import selection
from featx.export.parquet import Parquet

pytestmark = pytest.mark.usefixtures("in_tmp_path", "small_blocks")

OF_ANY_STORE = ("npy", "csv", "parquet", "safetensors", "zarr", "huggingface")
SHARDED = ("parquet", "safetensors", "huggingface")
FAILED = (3, 10, 20)


def write_store(dtype: str = "float32", packed: bool = True, **keys: Any) -> MadeRun:
    run = make_run(21, 8, dtype=dtype, failed=FAILED, **keys)
    run.copied(Path("store"), packed)
    return run


def export(kind: str, out: str = "out", **keys: Any) -> Path:
    options = {"format": kind, **keys.pop("export", {})}
    assert run_job("export", store="store", export=options, out=out, **keys) == 0
    return Path(out)


def check_rows(kind: str, run: MadeRun, rows: np.ndarray, layers: list[str]) -> None:
    """The export in `out` holds these rows of a made run, and nothing else."""
    found = READERS[kind](Path("out"))
    listing = run.listing
    names = [listing.classes[i] if i >= 0 else None for i in listing.labels[rows].tolist()]
    assert found.keys == [key.decode("utf-8", "backslashreplace") for key in listing.keys[rows]]
    assert found.rows == rows.tolist()
    assert found.labels == listing.labels[rows].tolist()
    assert found.status == run.status()[rows].tolist()
    assert found.classes == names
    assert sorted(found.layers) == sorted(layers)
    for name in layers:
        expected = run.expected(name)[rows]
        assert found.layers[name].dtype == expected.dtype
        assert np.array_equal(found.layers[name], expected, equal_nan=True), name


@pytest.mark.parametrize("kind", OF_ANY_STORE)
@pytest.mark.parametrize(("dtype", "ok_only"), [("float16", False), ("float32", True)])
def test_every_row_comes_back_in_order(kind: str, dtype: str, ok_only: bool) -> None:
    run = write_store(dtype)
    export(kind, export={"ok_only": ok_only})
    rows = np.flatnonzero(run.status() == 0) if ok_only else np.arange(21)
    assert len(rows) == (18 if ok_only else 21)
    check_rows(kind, run, rows, ["flat", "map"])


@pytest.mark.parametrize("kind", OF_ANY_STORE)
def test_the_printed_lines_open_every_row_in_any_folder(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_store()
    out = 'a "quoted", folder\\n'
    assert run_job("export", store="store", export={"format": kind}, out=out) == 0
    lines = capsys.readouterr().out.partition("\n\n")[2]
    found: dict[str, Any] = {}
    exec(lines, found)
    expected = run.expected("flat")
    if kind == "huggingface":
        assert np.array_equal(found["rows"][:]["flat"], expected, equal_nan=True)
    else:
        assert np.array_equal(found["X"][:], expected, equal_nan=True)


@pytest.mark.parametrize("kind", SHARDED)
def test_shards_hold_what_one_file_would(kind: str) -> None:
    run = write_store(packed=False)
    export(kind, export={"shard_gib": 1000 / 2**30})
    assert 3 <= len(READERS[kind](Path("out")).files) <= 10
    check_rows(kind, run, np.arange(21), ["flat", "map"])


@pytest.mark.parametrize("kind", OF_ANY_STORE)
def test_a_row_larger_than_a_block_or_a_shard_goes_alone(kind: str) -> None:
    run = make_run(3, 2, {"map": (40, 3)})
    run.write(Path("store"))
    export(kind, export={"shard_gib": 1e-9} if kind in SHARDED else {})
    check_rows(kind, run, np.arange(3), ["map"])


def test_layers_are_named_or_globbed() -> None:
    run = make_run(9, 4, {"a.b": (2,), "a.c": (3,), "d": (1,)})
    run.write(Path("store"))
    export("npy", layers="a.*")
    check_rows("npy", run, np.arange(9), ["a.b", "a.c"])
    export("npy", layers=["d", "a.b"], overwrite=True)
    check_rows("npy", run, np.arange(9), ["a.b", "d"])
    with pytest.raises(featx.FeatxError, match=r"no layer 'a\.x'.*Nearest: a"):
        export("npy", layers="a.x", overwrite=True)


@pytest.mark.parametrize("kind", [kind for kind in OF_ANY_STORE if kind != "csv"])
def test_keys_that_are_not_utf8_stay_apart(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(4, 4)
    keys = np.array([b"a\n b.jpg", b"c/\xc3\xa9.jpg", b"c/\xfe.jpg", b"c/\xff.jpg"])
    run = replace(run, listing=replace(run.listing, keys=keys))
    run.write(Path("store"))
    export(kind)
    check_rows(kind, run, np.arange(4), ["flat", "map"])
    assert "2 keys are not UTF-8" in capsys.readouterr().err
    if kind == "npy":
        assert np.load("out/keys.npy").tolist() == keys.tolist()


def test_cells_of_csv_are_text_in_one_line_and_no_formulas() -> None:
    run = make_run(4, 4)
    keys = np.array([b"=cmd.jpg", b"a\n,b.jpg", b"c/\xfe.jpg", b"d"])
    replace(run, listing=replace(run.listing, keys=keys)).write(Path("store"))
    export("csv")
    lines = Path("out/rows.csv").read_text("utf-8").splitlines()
    assert lines[0] == "row,key,label,class,status"
    assert [line.rsplit(",", 3)[0] for line in lines[1:]] == [
        "0,'=cmd.jpg", r'1,"a\n,b.jpg"', r"2,c/\xfe.jpg", "3,d"
    ]  # fmt: skip
    values = Path("out/features/flat.csv").read_text("utf-8").splitlines()
    assert len(values) == 5
    # DuckDB takes a line of numbers for a row of data.
    assert values[0] == "key,flat.0,flat.1,flat.2,flat.3,flat.4"


@pytest.mark.slow
def test_bfloat16_comes_as_float32() -> None:
    photos = Path("photos")
    for i in range(5):
        write_image(photos / f"{i}.png", i)
    store = extract(photos, dtype="bfloat16")
    export("npy")
    assert np.load("out/features/conv.npy").dtype == np.float32
    assert np.array_equal(np.load("out/features/conv.npy"), store["conv"][:])


def test_parquet_is_read_by_pandas_and_duckdb_too() -> None:
    import duckdb
    import pandas as pd

    run = write_store("float16")
    export("parquet", export={"shard_gib": 1000 / 2**30})
    table = pd.read_parquet("out/data")
    assert table["key"].tolist() == [key.decode() for key in run.listing.keys.tolist()]
    assert np.array_equal(np.stack(table["flat"]), run.expected("flat"), equal_nan=True)
    assert table["class"].isna().tolist() == (run.listing.labels < 0).tolist()
    asked = "select flat from 'out/data/*.parquet' where status = 0 order by row"
    rows = np.array([row[0] for row in duckdb.sql(asked).fetchall()])
    assert np.array_equal(rows, run.expected("flat")[run.status() == 0].astype(np.float32))


@pytest.mark.slow
def test_zarr_has_the_chunks_of_the_store() -> None:
    import zarr

    run = make_run(17, 8, {"flat": (5,), "wide": (1 << 17,)})
    run.write(Path("store"), packed=True)
    store = featx.open("store")
    export("zarr")
    group = zarr.open_group("out/features.zarr", mode="r")
    assert store["wide"].chunk_rows == 2
    for name in store.layers:
        assert group[f"features/{name}"].chunks[0] == store[name].chunk_rows
    check_rows("zarr", run, np.arange(17), ["flat", "wide"])


def test_zarr_names_the_dimensions_as_xarray_needs_it() -> None:
    import zarr

    write_store()
    export("zarr")
    group = zarr.open_group("out/features.zarr", mode="r")
    sizes: dict[str, int] = {}
    for name, array in [*group.arrays(), *group["features"].arrays()]:
        names = array.metadata.dimension_names
        assert names is not None, name
        assert names[0] == "row"
        for dimension, size in zip(names, array.shape, strict=True):
            assert sizes.setdefault(dimension, size) == size, "one size for each name"
    xarray = pytest.importorskip("xarray")
    with xarray.open_zarr("out/features.zarr", group="features", consolidated=False) as layers:
        assert {"row"} < set(layers.sizes)


def test_every_format_says_where_its_rows_come_from() -> None:
    import pyarrow.parquet as pq
    import zarr
    from safetensors import safe_open

    run = write_store()
    output = []
    for kind in OF_ANY_STORE:
        out = export(kind, overwrite=True)
        output.append(json.loads((out / "_export.json").read_text())["about"])
        if kind == "parquet":
            file = next((out / "data").iterdir())
            output.append(json.loads(pq.read_schema(file).metadata[b"featx"]))
        if kind == "safetensors":
            with safe_open(next(out.glob("*.safetensors")), framework="numpy") as shard:
                output.append(json.loads(shard.metadata()["featx"]))
        if kind == "zarr":
            output.append(zarr.open_group(out / "features.zarr", mode="r").attrs["featx"])
    for about in output:
        assert about["weights_sha256"] == run.header.weights_sha256
        assert about["model"] == "toy"
        assert about["classes"] == ["cat", "dög"]
        assert about["layers"]["map"]["shape"] == [3, 2, 2]
        assert about["layers"]["map"]["capture"] == "output"
        assert about["status"]["4"] == "decode error"


# The library itself leaves the files of its readers to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestWebDataset:
    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Names that share a stem, hold several dots, and one that is no image."""
        root = tmp_path_factory.mktemp("webdataset")
        names = ["cat/a.b.png", "cat/a.c.png", "cat/a.png", "cat/a.PNG", "dog.x/a.png", "e.png"]
        for seed, name in enumerate(names):
            write_image(root / "photos" / name, seed)
        (root / "photos/dog.x/broken.png").write_bytes(b"no image")
        with contextlib.chdir(root):
            extract("photos", layers=["conv", "pool"], max_failures=1)
        return root

    @pytest.fixture
    def photos(self, made: Path, tmp_path: Path) -> Path:
        """Their folder, beside a store of them."""
        shutil.copytree(made, tmp_path, dirs_exist_ok=True)
        return tmp_path / "photos"

    @pytest.mark.parametrize("ok_only", [False, True])
    def test_images_and_features_belong_together(self, photos: Path, ok_only: bool) -> None:
        store = featx.open("store")
        export("webdataset", export={"ok_only": ok_only, "shard_gib": 1e-5})
        found = READERS["webdataset"](Path("out"))
        rows = np.flatnonzero(store.ok) if ok_only else np.arange(7)
        assert len(rows) == (6 if ok_only else 7)
        assert found.keys == store.keys[rows].tolist()
        assert found.rows == rows.tolist()
        assert found.labels == store.labels[rows].tolist()
        assert found.status == store.status[rows].tolist()
        for name in ("conv", "pool"):
            assert np.array_equal(found.layers[name], store[name][rows], equal_nan=True)
        assert len(found.files) > 1
        images = {}
        for name in found.files:
            with tarfile.open(Path("out") / name) as tar:
                for member in tar.getmembers():
                    if member.name.endswith(".png"):
                        file = tar.extractfile(member)
                        assert file is not None
                        images[int(member.name[:-4])] = file.read()
        assert images == {row: (photos / store.keys[row]).read_bytes() for row in rows}

    def test_webdataset_decodes_the_images(self, photos: Path) -> None:
        import webdataset as wds

        export("webdataset", export={"ok_only": True})
        shard = "out/shards-00000-of-00001.tar"
        data = wds.WebDataset(shard, shardshuffle=False).decode("pil")
        sizes = [(image.size, conv.shape) for image, conv in data.to_tuple("png", "conv.npy")]
        assert sizes == [((48, 48), (8, 4, 4))] * 6

    @pytest.mark.parametrize(("dtype", "ending"), [(np.uint8, "ppm"), (np.uint16, "npy")])
    def test_images_whose_keys_have_no_ending_are_in_their_samples(
        self, dtype: type[np.integer[Any]], ending: str
    ) -> None:
        import h5py
        import webdataset as wds

        pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 40, 3), dtype)
        with h5py.File("images.h5", "w") as file:
            file["images"] = pixels
        data = {"name": "hdf5", "root": "images.h5", "dataset": "images"}
        model = {**MODEL, "transform": {"resize": 32, "crop": 32, "scale": "dtype"}}
        extract(data, layers=["pool"], model=model)
        export("webdataset")
        shard = wds.WebDataset("out/shards-00000-of-00001.tar", shardshuffle=False).decode("rgb8")
        assert np.array_equal([found[ending] for found in shard], pixels)

    # webdataset takes a text with braces or "::" for a pattern.
    @pytest.mark.parametrize("out", ["out", "a{b,c}", "a::b"])
    def test_the_printed_lines_give_every_row_also_one_that_failed(
        self, photos: Path, capsys: pytest.CaptureFixture[str], out: str
    ) -> None:
        export("webdataset", out=out, export={"shard_gib": 1e-5})
        printed = capsys.readouterr().out
        lines = printed[printed.index("import webdataset") :].splitlines()
        lines = lines[: 1 + next(i for i, line in enumerate(lines) if line.startswith("for "))]
        found: dict[str, Any] = {}
        collected = [*lines[:-1], "keys = [sample['__key__'] for sample in rows]"]
        exec("\n".join(collected), found)
        store = featx.open("store")
        assert not store.ok.all()
        assert [int(key) for key in found["keys"]] == list(range(len(store)))
        assert lines[-1].startswith("for sample in rows")

    def test_a_failed_row_without_its_image_stays(self, photos: Path) -> None:
        (photos / "dog.x" / "broken.png").unlink()
        export("webdataset")
        assert READERS["webdataset"](Path("out")).status == featx.open("store").status.tolist()
        with tarfile.open("out/shards-00000-of-00001.tar") as tar:
            names = tar.getnames()
        broken = featx.open("store").row("dog.x/broken.png")
        assert f"{broken:09d}.png" not in names
        assert f"{broken:09d}.json" in names

    def test_an_ok_row_whose_image_is_gone_stops_the_export(self, photos: Path) -> None:
        (photos / "cat" / "a.png").unlink()
        with pytest.raises(DataError, match=r"cat/a\.png is a row of the store.*data\.root"):
            export("webdataset")
        assert not list(Path().glob("out/*.tar"))

    def test_a_changed_image_stops_the_export_of_its_old_features(self, photos: Path) -> None:
        export("npy", out="arrays")
        write_image(photos / "cat" / "a.png", 1000)
        with pytest.raises(DataError, match=r"cat/a\.png has changed since its row was computed"):
            export("webdataset")
        extract("photos", layers=["conv", "pool"], max_failures=1, refresh=True)
        export("webdataset")
        with pytest.raises(StoreMismatchError, match="checksums of images"):
            export("npy", out="arrays")

    def test_images_that_moved_are_found_where_the_command_says(self, photos: Path) -> None:
        photos.rename("elsewhere")
        with pytest.raises(DataError):
            export("webdataset")
        export("webdataset", data="elsewhere")
        assert len(READERS["webdataset"](Path("out")).rows) == 7

    def test_layers_that_differ_by_case_only_are_refused(self) -> None:
        run = make_run(5, 4, {"Mixed": (2,), "mixed": (2,)})
        run.write(Path("store"))
        with pytest.raises(ConfigError, match="differ by case only"):
            export("webdataset")


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [
        ("parquet", "pyarrow", "export"),
        ("zarr", "zarr", "export"),
        ("huggingface", "datasets", "huggingface"),
    ],
)
def test_a_missing_package_names_its_extra(
    kind: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store()
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    with pytest.raises(MissingExtraError, match=rf"featx\[{extra}\]"):
        export(kind)
    assert not Path("out").exists()


@pytest.mark.parametrize("kind", ["parquet", "safetensors", "huggingface"])
def test_a_layer_with_the_name_of_a_column_is_refused(kind: str) -> None:
    make_run(5, 4, {"label": (2,)}).write(Path("store"))
    with pytest.raises(ConfigError, match="label"):
        export(kind)


def test_a_row_that_is_lost_meanwhile_is_never_written() -> None:
    run = make_run(9, 4)
    run.features["map"][5] = np.nan  # ok by its status, as a row is whose part went
    run.write(Path("store"))
    with pytest.raises(StoreError, match="has lost row 5 of map"):
        export("npy")
    assert not list(Path("out").rglob("*.npy"))


def test_narrow_rows_are_not_taken_by_the_million(set_block_sizes: Callable[..., None]) -> None:
    """As objects of Python, rows of csv took 2 KB each, whatever their features."""
    set_block_sizes(64 << 20)
    write_store()
    every = np.arange(150_000) % len(featx.open("store"))
    rows = selection.ExportSelection(featx.open("store"), ("flat",), every)
    spans = [(2, 65_538), (65_538, 131_074), (131_074, 150_000)]
    assert [*rows.spans(2, 150_000)] == spans
    assert [(start, stop) for start, stop, _ in rows.blocks(2, 131_074)] == spans[:2]
    assert [*rows.each_key()] == rows.keys.tolist()


def test_names_of_many_shards_sort_in_their_order() -> None:
    """Of 100,001 shards, which no store of a test has."""
    write_store()
    rows = selection.ExportSelection(featx.open("store"), ("flat",), np.zeros(100_001, np.int64))
    config = job_config("export", store="store", export={"format": "parquet", "shard_gib": 1e-9})
    names = [name for name, _, _ in Parquet(rows, config).shards(1.0, "data-{}.parquet")]
    assert names == sorted(names)
    assert (names[0], names[-1]) == (
        "data-000000-of-100001.parquet",
        "data-100000-of-100001.parquet",
    )
