"""Formats of other tools are read by the tools' own code, or by readers of their documented layout.

TRIDENT, CLAM and hloc are on no registry: `SlideTiles`, `bag_of` and `retrieved_pairs` read what
their sources read. Fields of other formats are compared in test_export_contract.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from format_readers import READERS
from made_store import MadeRun, make_run
from tiny_model import run_job

from featx.errors import ConfigError, RunError, StoreMismatchError

pytestmark = pytest.mark.usefixtures("in_tmp_path", "small_blocks")

FAILED = (3, 10, 20)


def write_store(num_rows: int = 21, **keys: Any) -> MadeRun:
    run = make_run(num_rows, 8 if num_rows < 100 else 128, {"flat": (8,)}, failed=FAILED, **keys)
    run.copied(Path("store"))
    return run


def with_keys(run: MadeRun, keys: list[bytes], **columns: np.ndarray) -> MadeRun:
    listing = replace(run.listing, keys=np.array(keys), columns=columns)
    return replace(run, listing=listing)


def export(kind: str, out: str = "out", **options: Any) -> Path:
    keys = {name: options.pop(name) for name in ("layers", "overwrite") if name in options}
    if "metric" in options:
        keys["neighbors"] = {"metric": options.pop("metric")}
    options = {"format": kind, **options}
    assert run_job("export", store="store", export=options, out=out, **keys) == 0
    return Path(out)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)


@pytest.mark.parametrize("kind", ["clip_retrieval", "faiss", "hloc"])
def test_failed_rows_are_left_out_and_counted(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_store()
    found = READERS[kind](export(kind))
    ok = np.flatnonzero(run.status() == 0)
    assert found.keys == [key.decode() for key in run.listing.keys[ok]]
    assert "18; 3 rows without features left out" in capsys.readouterr().out


class TestClipRetrieval:
    def test_rows_of_sorted_shards_are_unit_vectors_of_their_images(self) -> None:
        """More than ten shards: 10 would come before 2 without the leading zero."""
        run = write_store(dtype="float16")
        found = READERS["clip_retrieval"](export("clip_retrieval", shard_gib=16 / 2**30))
        ok = np.flatnonzero(run.status() == 0)
        assert len(found.files) == 18
        assert found.rows == ok.tolist()
        assert found.labels == run.listing.labels[ok].tolist()
        rows = found.layers["flat"].astype(np.float64)
        assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-3)
        assert (unit(rows) * unit(run.expected("flat")[ok])).sum(1).min() >= 0.9999

    def test_a_row_of_zeros_stays_zero_and_extreme_rows_have_length_1(self) -> None:
        run = make_run(3, 4, {"flat": (8,)})
        run.features["flat"][:] = np.array([0, 3e38, 1e-38], np.float32)[:, None]
        run.write(Path("store"))
        rows = READERS["clip_retrieval"](export("clip_retrieval")).layers["flat"]
        assert np.array_equal(rows[0], np.zeros(8))
        assert np.allclose(rows[1:], 8**-0.5, rtol=1e-3)

    def test_embedding_reader_gives_vectors_with_their_paths(self) -> None:
        reader = pytest.importorskip("embedding_reader", reason="it is in no extra of featx")
        run = write_store()
        out = export("clip_retrieval", shard_gib=64 / 2**30)
        found = reader.EmbeddingReader(
            embeddings_folder=str(out / "img_emb"),
            metadata_folder=str(out / "metadata"),
            meta_columns=["image_path"],
            file_format="parquet_npy",
        )
        assert (found.count, found.dimension) == (18, 8)
        keys = run.listing.keys.tolist()
        seen = 0
        for rows, about in found(batch_size=4, show_progress=False):
            for row, path in zip(rows, about["image_path"], strict=True):
                expected = run.expected("flat")[keys.index(path.encode())]
                assert np.allclose(row, unit(expected[None])[0], atol=1e-3)
                seen += 1
        assert seen == 18

    def test_several_layers_or_maps_are_refused(self) -> None:
        make_run(5, 4).write(Path("store"))
        with pytest.raises(
            ConfigError, match=r"2 are selected: flat, map\. .* 'layers=\[flat\]'\."
        ):
            export("clip_retrieval")
        with pytest.raises(ConfigError, match=r"rows of map are maps, tokens or single numbers"):
            export("clip_retrieval", layers="map")


class TestFaiss:
    @pytest.mark.parametrize(
        "index",
        [
            *("Flat", "SQfp16", "IVF4,Flat", "PCA4,IVF2,SQ8", "HNSW8"),
            *("IDMap,Flat", "IVF4,SQfp16,RFlat"),
        ],
    )
    def test_ids_are_rows_of_the_store(self, index: str) -> None:
        faiss = pytest.importorskip("faiss")
        run = write_store(400)
        out = export("faiss", index=index)
        ok = np.flatnonzero(run.status() == 0)
        asked = unit(run.expected("flat")[ok])
        for flag in (0, faiss.IO_FLAG_MMAP):
            found = faiss.read_index(str(out / "flat.index"), flag)
            assert found.ntotal == 397
            nearest = found.search(asked.astype(np.float32), 1)[1][:, 0]
            if "PCA" in index:  # half of the values are lost, so that a row may not find itself
                assert np.isin(nearest, ok).all()
            else:
                assert np.array_equal(nearest, ok)

    def test_distances_are_those_of_numpy(self) -> None:
        faiss = pytest.importorskip("faiss")
        run = write_store()
        ok = np.flatnonzero(run.status() == 0)
        rows = run.expected("flat")[ok].astype(np.float64)
        for metric in ("cosine", "euclidean"):
            out = export("faiss", out=metric, metric=metric)
            found = faiss.read_index(str(out / "flat.index"))
            one = unit(rows)[:1] if metric == "cosine" else rows[:1]
            scores, ids = found.search(one.astype(np.float32), 18)
            apart = ((rows - rows[0]) ** 2).sum(1)
            expected = unit(rows) @ unit(rows)[0] if metric == "cosine" else apart
            at = np.searchsorted(ok, ids[0])
            assert np.allclose(scores[0], expected[at], rtol=1e-4, atol=1e-5)
            assert (np.diff(expected[at] * (1 if metric == "euclidean" else -1)) > -1e-6).all()
        with pytest.raises(StoreMismatchError, match="metric: cosine, now euclidean"):
            export("faiss", out="cosine", metric="euclidean")

    def test_an_unknown_index_is_refused_before_anything_is_written(self) -> None:
        pytest.importorskip("faiss")
        write_store()
        with pytest.raises(ConfigError, match=r"export\.index=Falt.*could not parse"):
            export("faiss", index="Falt")
        with pytest.raises(ConfigError, match=r"export\.index=PQ7.*8 values of flat"):
            export("faiss", index="PQ7")
        assert not Path("out").exists()

    def test_too_few_rows_for_the_training_are_refused_before_it(self) -> None:
        """faiss may end the process with SIGSEGV in the training."""
        pytest.importorskip("faiss")
        write_store()
        for index, least in (
            *(("IVF99,Flat", 99), ("PQ4", 256), ("PQ4x5", 32), ("OPQ4,IVF4,PQ4", 256)),
            *(("OPQ4,Flat", 256), ("IVF4(PQ2),Flat", 256), ("IMI2x5,Flat", 32), ("IVF4,PQ4", 256)),
            *(("HNSW8_PQ4", 256), ("IDMap,PQ4", 256), ("PQ4,RFlat", 256)),
        ):
            metric = "euclidean" if "IMI" in index else "cosine"
            with pytest.raises(ConfigError, match=f"of flat is trained on {least} rows or more, "):
                export("faiss", index=index, metric=metric)
        assert not Path("out").exists()

    def test_as_many_rows_as_the_training_needs_are_enough(self) -> None:
        pytest.importorskip("faiss")
        write_store()
        for index in ("PCA8,Flat", "IVF18,Flat"):
            export("faiss", index=index, out=index)

    @pytest.mark.parametrize("index", ["IVF0,Flat", "IDMap,IVF0,Flat"])
    def test_an_index_that_leaves_out_rows_is_an_error(self, index: str) -> None:
        """faiss itself calls it an index of 18 rows."""
        pytest.importorskip("faiss")
        write_store()
        with pytest.raises(RunError, match=rf"{index} took 0 of the 18 rows of flat"):
            export("faiss", index=index)
        assert not list(Path("out").glob("*.index"))

    def test_another_index_or_metric_is_another_export(self) -> None:
        pytest.importorskip("faiss")
        write_store()
        export("faiss")
        with pytest.raises(StoreMismatchError, match="SQfp16"):
            export("faiss", index="SQfp16")
        export("faiss", index="SQfp16", overwrite=True)


def retrieved_pairs(path: Path, count: int) -> dict[str, list[str]]:
    """What hloc's pairs_from_retrieval selects: the largest inner products of other images."""
    with h5py.File(path, "r") as file:
        groups: list[str] = []
        file.visit(lambda name: groups.append(name) if "global_descriptor" in file[name] else None)
        rows = torch.from_numpy(np.stack([file[name]["global_descriptor"][:] for name in groups]))
    products = rows.float() @ rows.float().T
    products.fill_diagonal_(-torch.inf)
    best = products.topk(count, dim=1).indices
    return {groups[i]: [groups[j] for j in row] for i, row in enumerate(best.tolist())}


class TestHloc:
    def test_pairs_are_the_nearest_by_cosine(self) -> None:
        run = write_store()
        run.features["flat"][::2] *= 50  # longer rows must not win
        run.write(Path("scaled"))
        ok = np.flatnonzero(run.status() == 0)
        assert run_job("export", store="scaled", export={"format": "hloc"}, out="out") == 0
        keys = [key.decode() for key in run.listing.keys[ok]]
        rows = unit(run.expected("flat")[ok])
        cosines = rows @ rows.T - 2 * np.eye(18)
        found = retrieved_pairs(Path("out/global-feats-flat.h5"), 1)
        assert found == {keys[i]: [keys[cosines[i].argmax()]] for i in range(18)}

    def test_keys_of_any_depth_and_length_fit_in_the_reserved_space(self) -> None:
        run = make_run(300, 64, {"flat": (1,)})
        deep = "/".join(f"{i:03d}" for i in range(12))
        keys = sorted(
            f"{i % 37:04d}/{deep}/{'x' * (i % 200)}{i:04d}.jpg".encode() for i in range(300)
        )
        with_keys(run, keys).write(Path("store"))
        out = export("hloc")
        assert READERS["hloc"](out).keys == [key.decode() for key in keys]

    @pytest.mark.parametrize("key", [b"/a.jpg", b"a//b.jpg", b"./a.jpg", b"a\xff.jpg"])
    def test_a_key_that_hdf5_would_change_is_refused(self, key: bytes) -> None:
        with_keys(make_run(1, 1, {"flat": (2,)}), [key]).write(Path("store"))
        with pytest.raises(ConfigError, match="cannot be the name of a group"):
            export("hloc")

    def test_spaces_are_a_warning(self, capsys: pytest.CaptureFixture[str]) -> None:
        with_keys(make_run(2, 2, {"flat": (2,)}), [b"a b.jpg", b"c.jpg"]).write(Path("store"))
        assert READERS["hloc"](export("hloc")).keys == ["a b.jpg", "c.jpg"]
        assert "1 key has spaces" in capsys.readouterr().err


@dataclass
class SlideTiles:
    """A slide as TRIDENT's slide encoders get it: features, coordinates, attributes of these."""

    features: np.ndarray
    coords: np.ndarray
    attributes: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> SlideTiles:
        with h5py.File(path) as file:
            for name in ("features", "coords"):
                assert file[name].chunks == (1, *file[name].shape[1:])
                assert file[name].maxshape == (None, *file[name].shape[1:])
            return cls(file["features"][:], file["coords"][:], dict(file["coords"].attrs))


def bag_of(folder: Path, slide: str) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """A slide as CLAM's Generic_MIL_Dataset gets it: the tensor, and features and coordinates."""
    tensor = torch.load(folder / "pt_files" / f"{slide}.pt")
    with h5py.File(folder / "h5_files" / f"{slide}.h5", "r") as file:
        return tensor, torch.from_numpy(file["features"][:]), file["coords"][:]


class TestTrident:
    def write_tiles(self, num: int = 40, step: int = 512, **columns: np.ndarray) -> MadeRun:
        """Two slides, whose tiles are in another order by key than by position."""
        boxes = [(i % 5 * step, i // 5 * step) for i in range(num // 2)]
        keys = [
            b"wsi/%s.svs#%d,%d,512,512" % (name, *box) for name in (b"s1", b"s2") for box in boxes
        ]
        run = make_run(num, 16, {"flat": (6,)}, failed=[3, 30], dtype="float16")
        run = with_keys(run, sorted(keys), **columns)
        run.write(Path("store"))
        return run

    @pytest.mark.parametrize(("step", "overlap"), [(496, 8), (512, 0), (600, 0)])
    def test_tiles_are_sorted_and_belong_to_their_corners(self, step: int, overlap: int) -> None:
        run = self.write_tiles(step=step)
        out = export("trident", magnification=[40, 20])
        keys = run.listing.keys.tolist()
        seen = 0
        for name in ("s1", "s2"):
            tiles = SlideTiles.read(out / f"features_flat/{name}.h5")
            assert tiles.features.dtype == np.float16
            assert tiles.coords.dtype == np.int64
            assert tiles.coords.tolist() == sorted(tiles.coords.tolist(), key=lambda c: c[::-1])
            for row, (x, y) in zip(tiles.features, tiles.coords.tolist(), strict=True):
                place = keys.index(b"wsi/%s.svs#%d,%d,512,512" % (name.encode(), x, y))
                assert place not in (3, 30)
                assert np.array_equal(row, run.features["flat"][place])
                seen += 1
            assert tiles.attributes == {
                "patch_size": 256,
                "patch_size_level0": 512,
                "level0_magnification": 40,
                "target_magnification": 20,
                "overlap": overlap,
                "name": name,
                "savetodir": "features_flat",
            }
        assert seen == 38

    def test_the_overlap_is_that_of_two_tiles_also_with_two_grids(self) -> None:
        """Tools begin a grid at the corner of each piece of tissue."""
        boxes = [(0, 0), (496, 0), (0, 496), (100, 5003), (596, 5003)]
        keys = [b"wsi/s1.svs#%d,%d,512,512" % box for box in boxes]
        with_keys(make_run(5, 8, {"flat": (6,)}), sorted(keys)).write(Path("store"))
        out = export("trident", magnification=40)
        assert SlideTiles.read(out / "features_flat/s1.h5").attributes["overlap"] == 16

    def test_clam_reads_the_same_tiles_in_float32(self) -> None:
        self.write_tiles()
        out = export("trident", magnification=20, encoder="uni_v1")
        bags = export("clam", out="bags")
        for name in ("s1", "s2"):
            tiles = SlideTiles.read(out / f"features_uni_v1/{name}.h5")
            tensor, features, coords = bag_of(bags, name)
            assert tensor.dtype == features.dtype == torch.float32
            assert np.array_equal(tensor.numpy(), tiles.features.astype(np.float32))
            assert torch.equal(tensor, features)
            assert np.array_equal(coords, tiles.coords)

    def test_columns_give_magnification_and_size_of_each_slide(self) -> None:
        by_slide = np.repeat([40.0, 20.0], 20)
        self.write_tiles(level0_height=by_slide.astype("i8"), level0_magnification=by_slide)
        out = export("trident")
        for name, value in (("s1", 40), ("s2", 20)):
            attributes = SlideTiles.read(out / f"features_flat/{name}.h5").attributes
            assert attributes["level0_magnification"] == value
            assert attributes["target_magnification"] == value
            assert attributes["level0_height"] == value
            assert "level0_width" not in attributes
        out = export("trident", magnification=[None, 10], overwrite=True)
        for name, value in (("s1", 128), ("s2", 256)):
            attributes = SlideTiles.read(out / f"features_flat/{name}.h5").attributes
            assert (attributes["patch_size"], attributes["target_magnification"]) == (value, 10)

    def test_the_reserved_space_holds_many_narrow_tiles(self) -> None:
        keys = sorted(b"s.svs#%d,%d,8,8" % (i % 64 * 8, i // 64 * 8) for i in range(3000))
        with_keys(make_run(3000, 1024, {"flat": (1,)}), keys).write(Path("store"))
        tiles = SlideTiles.read(export("trident", magnification=20) / "features_flat/s.h5")
        assert len(tiles.features) == 3000

    def test_what_trident_cannot_hold_is_refused(self) -> None:
        self.write_tiles()
        with pytest.raises(ConfigError, match=r"export\.magnification=40"):
            export("trident")
        with pytest.raises(ConfigError, match="expected a whole number"):
            export("trident", magnification=[40, 7])
        export("trident", magnification=40)
        with pytest.raises(StoreMismatchError, match=r"magnification: 40.0, now 20"):
            export("trident", magnification=20)

    @pytest.mark.parametrize(
        ("keys", "problem"),
        [
            ([b"a.svs#0,0,8,8", b"a.svs#8,0,9,9"], "squares of equal size"),
            ([b"a.svs#0,0,8,9", b"a.svs#8,0,8,9"], "squares of equal size"),
            ([b"a.svs", b"b.svs#0,0,8,8"], "a.svs is no box"),
            ([b"b.svs#0,0,8,8", b"b.svs#0,0,8,8#hflip"], "hflip is no box"),
            ([b"x/a.svs#0,0,8,8", b"y/a.tif#0,0,8,8"], "two slides are called a"),
        ],
    )
    def test_rows_that_are_no_tiles_are_refused(self, keys: list[bytes], problem: str) -> None:
        with_keys(make_run(2, 2, {"flat": (2,)}), keys).write(Path("store"))
        with pytest.raises(ConfigError, match=problem):
            export("trident", magnification=20)

    def test_slides_whose_keys_interleave_stay_apart(self) -> None:
        """'a#1' is a prefix of 'a#1x': tiles of the second lie between those of the first."""
        keys = [b"a#1,0,8,8", b"a#1x#0,0,8,8", b"a#2,0,8,8"]
        run = with_keys(make_run(3, 2, {"flat": (2,)}), keys)
        run.write(Path("store"))
        out = export("trident", magnification=20)
        first = SlideTiles.read(out / "features_flat/a.h5")
        assert first.coords.tolist() == [[1, 0], [2, 0]]
        assert np.array_equal(first.features, run.features["flat"][[0, 2]])
        other = SlideTiles.read(out / "features_flat/a#1x.h5")
        assert np.array_equal(other.features, run.features["flat"][[1]])
