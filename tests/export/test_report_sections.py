"""The numbers of a report, compared with numbers by hand or by numpy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoded_images import encode
from made_store import make_header, make_labelled, make_run
from PIL import Image
from probe_problem import blobs, write_store
from tiny_model import run_job

import featx
from featx.errors import ReduceError
from featx.export.report.charts import (
    class_errors,
    confusion_map,
)
from featx.export.report.html import without_folders
from featx.export.report.layers import (
    layer_plot,
    layer_statistics,
    principal_scores,
    row_vectors,
    same_class_shares,
)
from featx.export.report.probe_results import Probes, probes_of
from featx.export.report.provenance import reasons_of, speed_of
from featx.export.report.similar_rows import (
    neighbours_of,
    similar_pairs,
)
from featx.export.report.thumbnails import readable_part
from featx.types import ImageFault, TokenGeometry

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def store_of(features: dict[str, np.ndarray], labels: list[int]) -> featx.FeatureStore:
    return featx.open(make_labelled(features, labels, ("a", "b")).write(Path("store")))


def test_statistics_of_a_map(set_block_sizes: Callable[..., None]) -> None:
    values = np.zeros((4, 3, 8, 8), np.float32)
    values[:, 0] = 2.0
    values[2, 1, 5, 5] = -3.0  # the third channel is dead
    store = store_of({"map": values}, [0, 1, 0, 1])
    set_block_sizes(2 * 3 * 64 * 4)  # two blocks
    found = layer_statistics(store, "map", np.arange(4))
    assert (found["channels"], found["dead"], found["what"]) == (3, 1, "channels")
    assert found["zeros"] == pytest.approx((values == 0).mean())
    assert found["mean"] == pytest.approx(values.mean())
    assert found["std"] == pytest.approx(values.std())
    assert (found["smallest"], found["largest"], found["nonfinite"]) == (-3, 2, 0)
    assert found["norms"] == pytest.approx((16, 16, 16, np.quantile([16, 16, 16, 265**0.5], 0.75),
                                         265**0.5))  # fmt: skip


def test_channels_that_cannot_be_told_are_numbers() -> None:
    values = np.zeros((3, 2, 3, 4), np.float32)
    values[:, 1] = 1
    found = layer_statistics(store_of({"odd": values}, [0, 0, 1]), "odd", np.arange(3))
    assert (found["channels"], found["dead"], found["what"]) == (24, 12, "numbers")


def test_channels_are_those_of_the_recorded_map() -> None:
    """The crop, 32x32 pixels, would make them the first axis: a map of 6x12 is of another input."""
    values = np.ones((3, 6, 12, 12), np.float32)
    values[..., [2, 5]] = 0
    run = make_labelled({"map": values}, [0, 0, 1], ("a", "b"))
    run = replace(run, tokens={"map": TokenGeometry(0, False, (6, 12), (96, 192))})
    found = layer_statistics(featx.open(run.write(Path("store"))), "map", np.arange(3))
    assert (found["channels"], found["dead"], found["what"]) == (12, 2, "channels")


def test_heat_maps_are_no_tokens() -> None:
    """They have no channels, and an average over their lines says nothing."""
    x = np.random.default_rng(0).normal(size=(8, 100, 90))
    run = make_labelled({"saliency": x}, [0] * 8, ["a"])
    about = {"capture": "attribution (target 0)", "reduce": "none", "reduce_args": {}}
    header = replace(run.header, fingerprint={**run.header.fingerprint, "codec": "none"})
    specs = (replace(run.specs[0], **about),)
    replace(run, header=header, specs=specs).write(Path("store"))
    store = featx.open("store")
    found = layer_statistics(store, "saliency", np.arange(8))
    assert (found["what"], found["channels"]) == ("numbers", 9000)
    assert "9000 numbers: too many" in row_vectors(store, "saliency", np.arange(8)).note
    options = {"covariance": "diagonal"}
    mean = featx.stats(store="store", stats=options)["saliency"].mean.numpy()
    np.testing.assert_allclose(mean, store["saliency"][:].mean(0).ravel(), rtol=0, atol=1e-6)
    with pytest.raises(ReduceError, match="a heat map has one number at each position"):
        featx.stats(store="store", stats={"observation": "position"}, overwrite=True)


def test_values_that_are_not_finite_are_counted() -> None:
    values = np.ones((3, 4), np.float32)
    values[1, 2:] = np.inf
    found = layer_statistics(store_of({"flat": values}, [0, 0, 1]), "flat", np.arange(3))
    assert found["nonfinite"] == 2
    assert found["norms"] == (2, 2, 2, 2, 2)
    assert found["largest"] == found["mean"] == 1


def test_the_spread_of_values_far_from_zero() -> None:
    values = np.full((4, 3), 1e9, np.float32)  # neighbouring numbers of float32 are 64 apart
    values[:, 0] += 64
    store = store_of({"far": values, "same": np.full((4, 3), 1000.1)}, [0, 1, 0, 1])
    found = [layer_statistics(store, layer, np.arange(4))["std"] for layer in ("far", "same")]
    assert found == pytest.approx([64 * 2**0.5 / 3, 0])


@pytest.mark.parametrize("shape", [(40, 7), (12, 30)])
def test_principal_components_are_those_of_an_svd(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).normal(size=shape) @ np.diag(np.arange(1, shape[1] + 1)) + 5
    scores, shares = principal_scores(x, 5)
    u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    assert np.abs(scores) == pytest.approx(np.abs(u[:, :5] * s[:5]), abs=1e-8)
    assert shares == pytest.approx(s**2 / (s**2).sum())
    assert (scores[np.abs(scores).argmax(0), range(5)] > 0).all()


def plot_of(
    store: featx.FeatureStore, layer: str, rows: np.ndarray, seed: int = 0, tsne: bool = False
) -> dict[str, Any]:
    return layer_plot(row_vectors(store, layer, rows), store.labels[rows], rows, seed, tsne)


@pytest.mark.parametrize("scale", [1, 1e-21, 1e16])
def test_a_plot_of_two_groups_keeps_them_apart(scale: float) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    x = rng.normal(size=(40, 6)).astype(np.float32) + 20 * labels[:, None]
    store = store_of({"flat": scale * x}, labels.tolist())
    found = plot_of(store, "flat", np.arange(40), seed=3, tsne=True)
    assert found["pca"] is not None
    assert found["tsne"] is not None
    assert found["explained"][0] > 0.9
    assert found["directions"] == 1
    assert found["mean_same_class"] is not None
    assert found["mean_same_class"] > 0.8
    assert ((found["pca"][:, 0] > 0) == labels).all() or ((found["pca"][:, 0] < 0) == labels).all()
    middle = [found["tsne"][labels == kind].mean(0) for kind in (0, 1)]
    nearer = np.linalg.norm(found["tsne"][:, None] - np.array(middle), axis=2).argmin(1)
    assert (nearer == labels).all()
    again = plot_of(store, "flat", np.arange(40), seed=3, tsne=True)
    assert np.array_equal(again["tsne"], found["tsne"])


def test_large_maps_are_averaged_block_by_block(set_block_sizes: Callable[..., None]) -> None:
    values = np.random.default_rng(0).normal(size=(11, 9, 32, 32)).astype(np.float32)
    store = store_of({"map": values}, [0, 1] * 5 + [0])
    set_block_sizes(4 * 4 * 9 * 32 * 32)
    found = plot_of(store, "map", np.arange(11))
    expected, shares = principal_scores(values.mean((2, 3)), 2)
    assert found["pooled"]
    assert found["width"] == 9
    assert found["directions"] == 1 + np.searchsorted(np.cumsum(shares), 0.9)
    assert found["pca"] == pytest.approx(expected, abs=1e-5)


def test_a_layer_without_a_plot_says_why() -> None:
    store = store_of({"flat": np.ones((9, 3), np.float32)}, [0] * 9)
    assert "the same vector" in plot_of(store, "flat", np.arange(9), tsne=True)["note"]
    assert "a plot needs 4 rows" in plot_of(store, "flat", np.arange(3), tsne=True)["note"]


@pytest.mark.parametrize("rows_of_image", [1, 3, 50])
def test_shares_of_the_same_class_among_the_nearest(
    set_block_sizes: Callable[..., None], rows_of_image: int
) -> None:
    """Of other images: boxes and views of one are near to each other."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 4)).astype(np.float32)
    labels = rng.integers(0, 3, 50)
    labels[7] = -1
    images = np.arange(50) // rows_of_image
    known = x[labels >= 0]
    unit = (x - known.mean(0)) / known.std(0)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    expected = np.full(50, np.nan)
    for row in range(50):
        order = np.argsort(-(unit @ unit[row]))
        others = [i for i in order if images[i] != images[row] and labels[i] >= 0][:10]
        expected[row] = (labels[others] == labels[row]).mean() if others else np.nan
    expected[7] = np.nan
    assert same_class_shares(x, labels, images) == pytest.approx(expected, nan_ok=True)
    set_block_sizes(4 * 100)
    assert same_class_shares(x, labels, images) == pytest.approx(expected, nan_ok=True)


def test_pairs_of_near_duplicates(set_block_sizes: Callable[..., None]) -> None:
    x = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32) + 5
    x[31] = x[2] + 0.01
    x[9] = x[8]
    for _ in range(2):
        pairs, count = similar_pairs(x, np.arange(40), 0.9, 10)
        assert [(i, j) for i, j, _ in pairs] == [(8, 9), (2, 31)]
        assert count == 2
        assert pairs[0][2] == pytest.approx(1)
        set_block_sizes(4 * 120)
    assert similar_pairs(x, np.arange(40), 0.9, 1) == (pairs[:1], 2)
    images = np.arange(40)
    images[9] = images[8]  # two views of an image are no duplicates
    assert similar_pairs(x, images, 0.9, 10) == (pairs[1:], 1)


def test_neighbours_are_exact_and_know_their_class(set_block_sizes: Callable[..., None]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 5)).astype(np.float32)
    x[7] = x[4]
    labels = [i % 2 for i in range(30)]
    labels[12] = -1
    store = store_of({"flat": x}, labels)
    found = neighbours_of(store, "flat", np.arange(30), [4], [12], 0, "cpu")
    ((row, nearest),), ((_, of_unlabelled),) = found["hard"], found["random"]
    assert (row, nearest[0]["row"], nearest[0]["same"]) == (4, 7, False)
    assert nearest[0]["cosine"] == pytest.approx(1)
    unit = (x - x.mean(0)) / x.std(0)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    order = np.argsort(-(unit @ unit[12]))[1:7]
    assert [each["row"] for each in of_unlabelled] == order.tolist()
    assert all(each["same"] is None for each in of_unlabelled)
    assert (found["among"], found["whole"]) == (30, True)
    keys = store.key_bytes.astype("S20")
    keys[[4, 7]] = b"00004.jpg#hflip", b"00004.jpg#vflip"
    run = make_labelled({"flat": x}, labels, ["a", "b"])
    run = replace(run, listing=replace(run.listing, keys=keys))
    viewed = featx.open(run.write(Path("viewed")))
    found = neighbours_of(viewed, "flat", np.arange(30), [4], [], 0, "cpu")
    order = [row for row in np.argsort(-(unit @ unit[4])) if row not in (4, 7)][:6]
    assert [each["row"] for each in found["hard"][0][1]] == order
    set_block_sizes(64 << 20, keep_bytes=10 * 5 * 4)
    part = neighbours_of(store, "flat", np.arange(30), [4], [12], 0, "cpu")
    assert 10 <= part["among"] <= 12
    assert not part["whole"]


def test_failures_are_grouped_by_reason() -> None:
    store = featx.open(make_run(21, failed=[0, 3, 4, 8, 11, 14]).write(Path("store")))
    found = {reason["status"]: reason for reason in reasons_of(store)}
    assert {status: reason["count"] for status, reason in found.items()} == {
        "missing": 2, "decode error": 1, "non finite": 3,
    }  # fmt: skip
    assert found["non finite"]["shown"] == [8, 11, 14]
    assert found["missing"]["messages"][0] == ("row 0: bröken, \n 'x'", 1)
    assert found["missing"]["title"] == "Missing"


def test_speed_of_runs() -> None:
    run = make_run(30, 8)
    root = run.write(Path("store"))
    entry = {"images_per_second": 12.5, "seconds": {"model": 2.0}, "finished": "then"}
    run.session(root).write_summary(entry)
    run.session(root).write_summary({**entry, "images_per_second": None})
    found = speed_of(featx.open(root))
    assert [each["images_per_second"] for each in found["runs"]] == [12.5, None]
    packed = featx.open(run.write(Path("packed"), packed=True))
    assert "no summary.json" in speed_of(packed)["missing"]
    run.session(Path("packed")).write_summary(entry)
    file = Path("packed/features.h5")
    assert [each["images_per_second"] for each in speed_of(featx.open(file))["runs"]] == [12.5]
    other = replace(run, header=make_header(crop=32)).write(Path("other"), packed=True)
    (other / "features.h5").rename("packed/other.h5")
    assert "single file" in speed_of(featx.open("packed/other.h5"))["missing"]
    (root / "summary.json").write_text("[]")
    assert "cannot be read" in speed_of(featx.open(root))["missing"]


def test_a_probe_of_another_state_says_so() -> None:
    x, y = blobs(60)
    store = featx.open(write_store(Path("store"), y, x=x))
    assert probes_of(store).note == "No probe yet."
    run_job("probe", store="store", device="cpu", probe={"method": "ridge"})
    assert probes_of(store).note == ""
    file, lines = Path("store/probe.json"), Path("store/probe/predictions.csv")
    said = json.loads(file.read_text())
    del said["sha256"]  # of the content before
    file.write_text("{")
    assert "cannot be read" in probes_of(store).note
    for text in ("{}", json.dumps({**said, "confusion": [[1]]})):
        file.write_text(text)
        assert "not as job=probe writes it" in probes_of(store).note
    file.write_text(json.dumps({**said, "rows_sha256": "of then"}))
    found = probes_of(store)
    assert "another state" in found.note
    assert found.predicted is None
    assert found.result is not None
    assert found.result["correct"] == said["correct"]
    assert found.majority == max(said["support"]) / said["rows"]
    # The file that the page names must be that of this probe, and as job=probe writes it.
    lines.write_text("layer,method,seed,fold,split\nx,ridge,0,,test\n")
    said["predictions"]["sha256"] = hashlib.sha256(lines.read_bytes()).hexdigest()
    file.write_text(json.dumps(said))
    assert "predictions.csv is not as job=probe writes it" in probes_of(store).note


def test_near_duplicates_of_a_probe_are_rows_of_this_store() -> None:
    rng = np.random.default_rng(0)
    x, other = rng.normal(size=(2, 60, 70)).astype(np.float32)
    y = np.arange(60) % 3
    x[8:16], other[5] = x[7], x[17]
    store = featx.open(write_store(Path("store"), y, x=x))
    make_labelled({"x": other}, y, ("c0", "c1", "c2")).changed(other=1).write(Path("other"))
    names = {"method": "ridge", "folds": 3}
    run_job("probe", store="store", device="cpu", probe=names)
    leaked = {row for pair in probes_of(store).leaked_pairs for row in pair[:2]}
    assert leaked
    assert leaked <= {*range(7, 16)}
    file = Path("store/probe.json")
    said = json.loads(file.read_text())
    del said["sha256"]
    file.write_text(json.dumps({**said, "rows_sha256": "of then"}))
    assert probes_of(store).leaked_pairs == ()
    # Row 5 of the other store, which has the key of row 5 of this one, is like row 17.
    run_job("probe", store="store", device="cpu", probe={"method": "ridge", "test_store": "other"})
    said = json.loads(file.read_text())
    assert [list(pair.values())[:2] for pair in said["near_duplicates"]["pairs"]] == [
        ["00005.jpg", "00017.jpg"]
    ]
    assert probes_of(store).leaked_pairs == ()


def test_a_probe_of_too_many_classes_for_a_confusion_matrix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featx.analysis.probe.class_metrics.MAX_CONFUSION", 2)
    x, y = blobs(60)
    store = featx.open(write_store(Path("store"), y, x=x))
    run_job("probe", store="store", device="cpu", probe={"method": "ridge"})
    found = probes_of(store)
    assert found.note == ""
    assert found.confusion is None
    assert found.result is not None
    assert found.majority == max(found.result["support"]) / found.result["rows"]
    wrong = found.result["rows"] - found.result["correct"]
    assert f"errors      {wrong} of {found.result['rows']}\n" in capsys.readouterr().out
    run_job("report", store="store", device="cpu")
    assert "Confusion" not in Path("store/report.html").read_text()


def probed(classes: tuple[str, ...], counts: np.ndarray) -> Probes:
    return Probes("", {"task": "classification", "classes": classes}, counts)


def test_only_the_classes_with_most_errors_are_in_the_matrix() -> None:
    names = tuple(str(i) for i in range(50))
    counts = np.diag(np.arange(50) + 1)
    counts[7, 31] = 4
    found = confusion_map(probed(names, counts))
    assert found is not None
    assert len(found["names"]) == 20
    (((row, column), wrong),) = [
        item for item in found["cells"].items() if item[1]["kind"] == "wrong"
    ]
    assert wrong["title"] == "7 predicted as 31: 4 of 12"
    assert (found["names"][row], found["names"][column]) == ("7", "31")
    first, second = class_errors(probed(names, counts))
    assert (first["name"], first["recall"], first["precision"]) == ("7", 8 / 12, 1)
    assert first["predicted"] == [("31", 4)]
    assert (second["name"], second["recall"], second["precision"]) == ("31", 1, 32 / 36)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[Errno 2] No such file: '/home/me/photos/a b.png'",
            "[Errno 2] No such file: '…/a b.png'",
        ),
        ("data.root=/mnt/x does not exist", "data.root=…/x does not exist"),
        ("see /home/me/photos/cat/1.png, or C:\\Users\\me\\a.png", "see …/cat/1.png, or …/a.png"),
        ("12 images/s and 1/2 of blocks/0", "12 images/s and 1/2 of blocks/0"),
        ("s3://bucket/key and https://host/path", "s3://bucket/key and https://host/path"),
        ("<b>bold</b> / none", "<b>bold</b> / none"),
    ],
)
def test_absolute_paths_are_shortened(text: str, expected: str) -> None:
    assert without_folders(text, ["/home/me/photos"]) == expected


def test_the_readable_part_of_a_truncated_image() -> None:
    image = Image.fromarray(np.full((64, 48, 3), (200, 60, 20), np.uint8))
    found = np.array(readable_part(encode(image, "BMP")[: 54 + 48 * 3 * 16], 10_000))
    assert found.shape == (64, 48, 3)
    # A BMP begins with its last line.
    assert (found[-16:] == (200, 60, 20)).all()
    noise = np.random.default_rng(0).integers(1, 256, (64, 48, 3), np.uint8)
    for kind in ("PNG", "JPEG"):
        data = encode(Image.fromarray(noise), kind, quality=95)
        found = np.array(readable_part(data[: len(data) // 2], 10_000))
        assert (found[-8:] == 128).all()
        assert not (found[:8] == 128).all()
    with pytest.raises(ImageFault, match="48 x 64 pixels"):
        readable_part(data, 100)
    for other in (b"no image", encode(image, "PCX")):
        with pytest.raises(ImageFault):
            readable_part(other, 10_000)
