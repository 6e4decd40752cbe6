"""tensorboard=true: what TensorBoard's own reader finds, and that the run never depends on it."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import slow_except
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_model import KEYS, MODEL, run_job, write_image
from tiny_model import extract as extract_and_pack
from torch.utils.tensorboard import RecordWriter
from zoo import TwoStageConvNet

import featx
from featx.config import Config
from featx.errors import ConfigError, MissingExtraError
from featx.export.tensorboard.events import Histogram
from featx.pipeline import Interrupted

pytestmark = pytest.mark.usefixtures("in_tmp_path")

COLOURS = {
    "blue": (0, 0, 255),
    "green": (0, 128, 0),
    "orange": (255, 128, 0),
    "red": (255, 0, 0),
    "white": (255, 255, 255),
}


class Untraceable(TwoStageConvNet):
    """Its result is nothing that torch.jit knows."""

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(x))


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """An image of each colour in a class folder of its name, and one that is none."""
    for name, colour in COLOURS.items():
        path = tmp_path / "colours" / name / f"{name}.png"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (40, 50), colour).save(path)
    (tmp_path / "colours" / "green" / "broken.png").write_bytes(b"no image")
    return tmp_path / "colours"


def extract(data: Path, **keys: Any) -> featx.FeatureStore:
    """The store as parts, which is all that matters here and takes less time."""
    return extract_and_pack(data, **{"pack": False, **keys})


def read_back(folder: str = "store/tensorboard/run-0") -> EventAccumulator:
    guidance = {"scalars": 0, "histograms": 0, "graph": 0}  # everything
    accumulator = EventAccumulator(folder, size_guidance=guidance)
    accumulator.Reload()
    return accumulator


def steps(accumulator: EventAccumulator, tag: str = "run/images_per_second") -> list[int]:
    return [event.step for event in accumulator.Scalars(tag)]


def histograms(accumulator: EventAccumulator, layer: str) -> dict[int, np.ndarray]:
    """step -> (k, 3) left edges, right edges, counts."""
    found = {}
    for event in accumulator.Histograms(f"activations/{layer}"):
        values = event.histogram_value
        edges = np.array([values.min, *values.bucket_limit])
        found[event.step] = np.stack([edges[:-1], edges[1:], values.bucket], axis=1)
    return found


def stored_bytes(root: str = "store") -> bytes:
    return (Path(root) / "features.h5").read_bytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_number_lies_in_its_bin(dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-9, 4, (3000,), generator=generator)
    values = torch.randn(3000, generator=generator) * sizes
    largest = torch.finfo(getattr(torch, dtype)).max
    ends = torch.tensor([0.0, 0.0, -0.0, largest, -largest])
    stored = torch.cat([values, ends]).to(getattr(torch, dtype))
    bits = stored.view(torch.uint16) if dtype == "bfloat16" else stored
    histogram = Histogram(dtype)
    histogram.add(bits[:1000].reshape(10, 4, 25).permute(0, 2, 1).numpy())  # not contiguous
    histogram.add(bits[1000:].numpy())
    edges, counts = histogram.take()
    left, right = edges[:-1], edges[1:]
    numbers = stored.double().numpy()
    negative = np.signbit(numbers)  # -0 counts as negative
    distance = np.abs(numbers)
    for low, high, count in zip(left, right, counts, strict=True):
        below = np.signbit(low)
        nearest, farthest = sorted((abs(low), abs(high)))
        inside = (negative == below) & (distance >= nearest) & (distance < farthest)
        if farthest == largest:
            inside |= (negative == below) & (distance == largest)
        assert inside.sum() == count
    assert counts.sum() == len(numbers)
    narrow = (left > 1e-3) & (counts > 0)
    assert (right[narrow] / left[narrow] <= 1 + 1 / 16).all()
    assert (np.diff(edges) > 0).all()
    assert [len(each) for each in histogram.take()] == [0, 0]


def test_the_events_hold_every_value_and_the_timings_of_every_part(photos: Path) -> None:
    """They change neither the features nor the fingerprint."""
    (photos / "cat" / "006.png").write_bytes(b"no image")  # row 1, in the first part
    keys: dict[str, Any] = {"layers": ["conv", "conv:input"], "max_failures": 1, "part_rows": 4}
    store = extract(photos, tensorboard=True, **keys)
    without = extract(photos, out="without", **keys)
    assert store.attrs["fingerprint"] == without.attrs["fingerprint"]
    assert all(store[name][:].tobytes() == without[name][:].tobytes() for name in store)
    found = read_back()
    assert steps(found) == [4, 8, 12, 16, 20, 21]
    assert [event.value for event in found.Scalars("run/failures")] == [1, 0, 0, 0, 0, 0]
    for stage in ("read", "decode", "wait", "model", "copy", "write"):
        seconds = [event.value for event in found.Scalars(f"seconds/{stage}")]
        assert len(seconds) == 6
        assert min(seconds) >= 0
        assert stage in ("wait", "copy") or max(seconds) > 0
    for layer in store.layers:
        for step, buckets in histograms(found, layer).items():
            rows = np.arange(max(0, (step - 1) // 4 * 4), step)
            values = store[layer][rows[store.ok[rows]]].astype(np.float64).ravel()
            left, right, counts = buckets.T
            assert counts.sum() == len(values)
            assert left[0] <= values.min() <= right[0]
            assert left[-1] <= values.max() <= right[-1]
            assert counts[left >= 0].sum() == (values >= 0).sum()
    names = [node.name for node in found.Graph().node]
    assert any("conv" in name for name in names)
    assert any("head" in name for name in names)


@pytest.mark.slow
def test_a_resumed_run_continues_with_the_next_step(
    photos: Path, on_batch: list[Callable[[Any], None]]
) -> None:
    def interrupted(batch: Any) -> None:
        if batch.start == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    on_batch.append(interrupted)
    with pytest.raises(Interrupted):
        extract(photos, tensorboard=True, part_rows=4)
    assert steps(read_back()) == [4, 8, 12]
    on_batch.clear()
    extract(photos, tensorboard=True, part_rows=4)
    found = read_back()
    assert steps(found) == [4, 8, 12, 16, 20, 21]
    counts = {step: buckets[:, 2].sum() for step, buckets in histograms(found, "conv").items()}
    assert counts == {4: 512, 8: 512, 12: 512, 16: 512, 20: 512, 21: 128}


@pytest.mark.parametrize("decode", slow_except(["fast", "reference"], "fast"))
def test_sprites_metadata_and_vectors_are_of_the_same_rows_in_the_same_order(
    colours: Path, decode: str
) -> None:
    store = extract(colours, layers=["conv:input"], decode=decode, max_failures=1, tensorboard=True)
    folder = Path("store/tensorboard")
    assert metadata(folder) == [
        ["label", "key", "row"],
        ["blue", "blue/blue.png", "0"],
        ["green", "green/green.png", "2"],  # broken.png is before it, and not here
        ["orange", "orange/orange.png", "3"],
        ["red", "red/red.png", "4"],
        ["white", "white/white.png", "5"],
    ]
    sheet = np.asarray(Image.open(folder / "projector/sprites.png"))
    assert sheet.shape == (96, 96, 3)
    tiles = sheet.reshape(3, 32, 3, 32, 3).swapaxes(1, 2).reshape(9, 32, 32, 3)
    for tile, colour in zip(tiles, COLOURS.values(), strict=False):
        assert (tile == colour).all()
    config = (folder / "projector_config.pbtxt").read_text()
    assert 'tensor_name: "conv:input"' in config
    assert config.count("single_image_dim: 32") == 2
    vectors = np.loadtxt(folder / "projector/vectors-0.tsv", delimiter="\t")
    expected = store["conv:input"][np.flatnonzero(store.ok)].astype(np.float64).mean((2, 3))
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6)


def test_a_grid_of_other_proportions_is_averaged_over_its_cells(colours: Path) -> None:
    grid = {"name": "grid", "rows": 3, "columns": 4}
    store = extract(colours, layers={"conv:input": grid}, max_failures=1, tensorboard=True)
    vectors = np.loadtxt("store/tensorboard/projector/vectors-0.tsv", delimiter="\t")
    expected = store["conv:input"][np.flatnonzero(store.ok)].astype(np.float64).mean((2, 3))
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6)


def metadata(folder: Path) -> list[list[str]]:
    text = (folder / "projector/metadata.tsv").read_text()
    return [line.split("\t") for line in text.splitlines()]


def test_a_graph_that_was_interrupted_is_written_by_the_same_command(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("torch.utils.tensorboard.SummaryWriter.add_graph", interrupted)
        with pytest.raises(KeyboardInterrupt):
            extract(photos, layers=["pool"], tensorboard=5)
    assert not list(Path("store").rglob("*.graph"))
    extract(photos, layers=["pool"], tensorboard=5)
    assert read_back().Graph().node


def test_a_finished_store_gets_a_projector_and_a_graph_and_no_row_again(
    photos: Path, computed: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [path.relative_to(photos.parent) for path in sorted(photos.rglob("*.png"))]
    lines = [f"{path},{path.parent.name}\n" for path in paths]
    Path("t.csv").write_text("".join(["path,label\n", *lines]))
    extract("t.csv", layers=["pool"], pack=True)
    before, manifest = stored_bytes(), Path("store/featx.json").read_bytes()
    computed.clear()
    (photos / "cat" / "000.png").unlink()
    extract("t.csv", layers=["pool"], tensorboard=5)
    assert computed == []
    assert stored_bytes() == before
    assert Path("store/featx.json").read_bytes() == manifest
    rows = [row for _, _, row in metadata(Path("store/tensorboard"))]
    assert rows == ["row", "0", "5", "10", "15", "20"]
    assert "1 image cannot be read now" in capfd.readouterr().err
    sheet = np.asarray(Image.open("store/tensorboard/projector/sprites.png"))
    assert (sheet[:32, :32] == 128).all()
    assert sheet[:32, 32:64].std() > 20
    assert read_back().Graph().node
    graphs = list(Path("store/tensorboard/run-0").glob("*.graph"))
    extract("t.csv", layers=["pool"], tensorboard=True)
    assert list(Path("store/tensorboard/run-0").glob("*.graph")) == graphs
    assert len(metadata(Path("store/tensorboard"))) == 22


@pytest.mark.slow
def test_layers_that_are_added_have_curves_of_their_own(photos: Path) -> None:
    extract(photos, tensorboard=True)
    extract(photos, layers=["conv", "deep"], tensorboard=True)
    found = read_back("store/tensorboard/run-1")
    assert steps(found) == [8, 16, 21]
    assert found.Tags()["histograms"] == ["activations/deep"]
    config = Path("store/tensorboard/projector_config.pbtxt").read_text()
    assert config.index('"conv"') < config.index('"deep"')


@pytest.mark.slow
def test_overwrite_deletes_the_events_too(photos: Path) -> None:
    extract(photos, tensorboard=True)
    extract(photos, overwrite=True)
    assert not Path("store/tensorboard").exists()


def test_a_full_disk_costs_the_events_and_not_the_features(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write = RecordWriter.write
    records = 0

    def full(self: RecordWriter, data: bytes) -> None:
        nonlocal records
        records += 1
        if records > 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", full)
    store = extract(photos, tensorboard=True)
    assert store.complete
    assert store.ok.all()
    assert steps(read_back()) == [8]
    assert capfd.readouterr().err.count("No space left on device") == 1


def test_a_file_where_the_events_should_go_is_a_warning(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("store").mkdir()
    Path("store/tensorboard").write_text("mine")
    assert extract(photos, tensorboard=True).complete
    output = capfd.readouterr().err
    assert "The run continues without events." in output
    assert "The store is not affected." in output
    assert Path("store/tensorboard").read_text() == "mine"


def test_a_model_that_cannot_be_traced_has_no_graph(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = {**MODEL, "factory": "test_tensorboard:Untraceable"}
    assert extract(photos, model=model, tensorboard=True).complete
    lines = [line for line in capfd.readouterr().err.splitlines() if "no graph" in line]
    assert len(lines) == 1
    assert "torch.jit.trace" in lines[0]
    assert "Graph" not in read_back().Tags() or not read_back().Tags()["graph"]
    assert Path("store/tensorboard/projector_config.pbtxt").exists()


def test_keys_of_all_kinds_stay_one_line_of_metadata(tmp_path: Path) -> None:
    names = [b"a\tb.png", "ü.png".encode(), b"\xff.png", b"plain.png"]
    (tmp_path / "odd").mkdir()
    for i, name in enumerate(names):
        write_image(tmp_path / "odd" / os.fsdecode(name), i)
    store = extract(tmp_path / "odd", tensorboard=True)
    keys = [key for _, key, _ in metadata(Path("store/tensorboard"))[1:]]
    assert keys == [r"a\tb.png", "plain.png", "ü.png", "\\xff.png"]
    assert len(store) == 4


def test_a_store_without_an_ok_row_has_no_projector(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"no image")
    extract(tmp_path / "bad", tensorboard=True, max_failures=1)
    assert "no row is ok" in capfd.readouterr().err
    assert not Path("store/tensorboard/projector_config.pbtxt").exists()


class WideNet(TwoStageConvNet):
    """With a layer of more numbers than a projector shows."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(4, 8193)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(super().forward(x))


def test_wide_layers_are_left_out_of_the_projector(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = {**MODEL, "factory": "test_tensorboard:WideNet"}
    extract(photos, model=model, layers=["deep", "wide"], tensorboard=True)
    config = Path("store/tensorboard/projector_config.pbtxt").read_text()
    assert '"deep"' in config
    assert '"wide"' not in config
    assert "wide is not in the projector, over 8192 numbers" in capfd.readouterr().err


def test_without_the_package_the_error_names_the_extra(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"featx\[tensorboard\]") as error:
        extract(photos, tensorboard=True)
    assert error.value.exit_code == 2
    assert not Path("store").exists()


@pytest.mark.slow
def test_the_repair_of_a_store_needs_no_tensorboard(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(photos, tensorboard=True)
    Path("store/parts/part-000002.h5").unlink()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert run_job("verify", store="store", verify={"repair": True}) == 0


@pytest.mark.parametrize("value", [0, -1, 16385, "yes", 1.5, None])
def test_what_is_no_number_of_images_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="how many images"):
        Config(tensorboard=value)


def test_the_key_belongs_to_the_main_job(photos: Path) -> None:
    with pytest.raises(ConfigError, match="tensorboard has an effect with job=extract and"):
        run_job("verify", store="store", tensorboard=True)
    plan = {**KEYS, "out": "other", "data": str(photos)}
    assert run_job("plan", tensorboard=True, **plan) == 0
