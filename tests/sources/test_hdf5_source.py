"""Images in HDF5: every layout, encoded bytes, labels, and files that are not to be trusted."""

from __future__ import annotations

import io
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
from encoded_images import encode
from image_faults import image_fault
from PIL import Image

from featx.config import DataConfig
from featx.errors import ConfigError, DataError
from featx.images import ImagePolicy, decode_pillow
from featx.sources import open_source
from featx.sources.hdf5 import Hdf5Options
from featx.types import ImageFault, Source, Status

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 8, 9, 3), dtype=np.uint8)
POLICY = ImagePolicy.from_config(DataConfig())


def hdf5(root: Path, dataset: str = "/images", **keys: object) -> Source:
    return open_source(Hdf5Options(root=str(root), dataset=dataset, **keys))


def decoded(source: Source) -> np.ndarray:
    keys = source.listing().keys.tolist()
    return np.stack([np.asarray(decode_pillow(source.read(key), POLICY)) for key in keys])


def refused(path: Path, message: str, **keys: str) -> None:
    with pytest.raises(DataError, match=message):
        hdf5(path, **keys).listing()


def grey(pixels: np.ndarray) -> np.ndarray:
    return np.repeat(pixels[..., None], 3, axis=-1)


def test_pixels_in_every_layout_come_back_without_loss(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["last"] = PIXELS
        file["first"] = PIXELS.transpose(0, 3, 1, 2)
        file["grey"] = PIXELS[..., 0]
        file["grey_last"] = PIXELS[..., :1]
        file["grey_first"] = PIXELS[:, None, :, :, 0]
        file.create_dataset("deep/in/packed", data=PIXELS, compression="gzip", chunks=(2, 8, 9, 3))
    for name in ("last", "first", "/deep/in/packed"):
        np.testing.assert_array_equal(decoded(hdf5(tmp_path / "x.h5", name)), PIXELS)
    for name in ("grey", "grey_last", "grey_first"):
        found = decoded(hdf5(tmp_path / "x.h5", name))
        np.testing.assert_array_equal(found, grey(PIXELS[..., 0]))
    keys = hdf5(tmp_path / "x.h5", "last").listing().keys.tolist()
    assert keys == [b"000000", b"000001", b"000002", b"000003", b"000004"]


def test_encoded_bytes_of_both_kinds_end_in_their_own_zeros(tmp_path: Path) -> None:
    encoded = []
    for pixels in PIXELS:
        pixels = pixels.copy()
        pixels[0] = 0  # a BMP ends with its first line: zeros that belong to it
        encoded.append(encode(Image.fromarray(pixels), "BMP"))
    assert encoded[0].endswith(b"\0")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        rows = file.create_dataset("vlen", (5,), h5py.vlen_dtype(np.uint8))
        for i, data in enumerate(encoded):
            rows[i] = np.frombuffer(data, np.uint8)
        file["fixed"] = np.array([data.ljust(400, b"\0") for data in encoded], dtype="S400")
        file["opaque"] = np.array(encoded, dtype=f"V{len(encoded[0])}")
    source = hdf5(tmp_path / "x.h5", "vlen")
    assert [source.read(key) for key in source.listing().keys.tolist()] == encoded
    for name in ("fixed", "opaque", "vlen"):
        found = decoded(hdf5(tmp_path / "x.h5", name))
        np.testing.assert_array_equal(found[:, 1:], PIXELS[:, 1:])


def test_rows_without_bytes_are_failures(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("vlen", (2,), h5py.vlen_dtype(np.uint8))[0] = np.ones(3, np.uint8)
        file["fixed"] = np.array([b"x", b""])
    for name in ("vlen", "fixed"):
        source = hdf5(tmp_path / "x.h5", name)
        source.listing()
        with image_fault(Status.EMPTY):
            source.read(b"000001")


def test_labels_are_one_number_or_text_a_row(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = PIXELS
        file["text"] = ["dog", "cat", "dog", "", "cat"]
        file["fixed"] = np.array([b"dog", b"cat", b"dog", b"", b"cat"])
        file["short"] = [1, 2]
        file["onehot"] = np.eye(5, dtype=np.int8)
        file["matlab"] = np.array([[2.0, 0, 1, 2, np.nan]])
        file["char"] = np.arange(5, dtype=np.uint16)
        file["char"].attrs["MATLAB_class"] = np.bytes_(b"char")
    for name in ("text", "fixed"):
        named = hdf5(tmp_path / "x.h5", label_column=name).listing()
        assert (named.labels.tolist(), named.classes) == ([1, 0, 1, -1, 0], ("cat", "dog"))
    refused(tmp_path / "x.h5", r"/short is \(2,\); expected \(5,\)", label_column="/short")
    vector = hdf5(tmp_path / "x.h5", label_column="/matlab").listing()
    assert (vector.labels.tolist(), vector.classes) == ([2, 0, 1, 2, -1], ("0", "1", "2"))
    refused(tmp_path / "x.h5", r"/onehot is \(5, 5\); expected \(5,\)", label_column="/onehot")
    refused(tmp_path / "x.h5", "/char is no dataset of whole numbers or text", label_column="/char")
    refused(tmp_path / "x.h5", "has no /none", label_column="/none")


def test_labels_that_were_never_written_are_none(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = PIXELS
        for name, dtype in (("labels", "u1"), ("text", h5py.string_dtype())):
            file.create_dataset(name, (5,), dtype, chunks=(2,), compression="gzip")
        file["labels"][:2], file["text"][:2] = [1, 2], ["dog", "cat"]
    numbers = hdf5(tmp_path / "x.h5", label_column="labels").listing()
    assert numbers.labels.tolist() == [1, 2, -1, -1, -1]
    text = hdf5(tmp_path / "x.h5", label_column="text").listing()
    assert (text.labels.tolist(), text.classes) == ([1, 0, -1, -1, -1], ("cat", "dog"))
    for listing in (numbers, text):
        assert "3 labels were never written" in listing.warnings[-1]
    none = hdf5(tmp_path / "x.h5").listing()
    assert none.label_note == (
        "data.label_column names no dataset; /labels looks like labels: data.label_column=/labels"
    )


def test_other_shapes_and_types_are_errors_that_say_what_is_expected(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["complex"] = np.zeros((2, 8, 9, 3), np.complex64)
        file["both"] = np.zeros((2, 3, 9, 3), np.uint8)
        file["flat"] = np.zeros((2, 81), np.uint8)
        file["photo"] = np.zeros((8, 9, 3), np.uint8)
        file["text"] = ["a", "b"]
        file["none"] = np.zeros((0, 8, 9, 3), np.uint8)
        file["empty"] = np.zeros((2, 0, 9, 3), np.uint8)
        file["group/x"] = 1
    for name, message in (
        ("complex", r"/complex is \(2, 8, 9, 3\) complex64; expected \(N, H, W, 3\|1\)"),
        ("both", "the channels may come first or last"),
        ("flat", "expected"),
        ("photo", r"/photo is \(8, 9, 3\), which looks like one image; expected \(N, H, W"),
        ("text", "object; expected"),
        ("none", "has no rows"),
        ("empty", r"/empty is \(2, 0, 9, 3\) uint8; expected"),
        ("group", "is no plain dataset"),
        ("nothing", "has no /nothing. At the top of the file: /both"),
    ):
        refused(tmp_path / "x.h5", message, dataset=name)
    (tmp_path / "y.h5").write_bytes(b"not HDF5")
    refused(tmp_path / "y.h5", r"y\.h5 cannot be read as HDF5")
    refused(tmp_path / "z.h5", r"z\.h5 cannot be read as HDF5: No such file")
    with pytest.raises(ConfigError, match=r"data=hdf5 needs data\.dataset"):
        Hdf5Options(root="x.h5")


def test_other_numbers_and_channels_are_read_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "floats": rng.standard_normal((3, 8, 9, 5)).astype(np.float32),
        "deep": rng.integers(0, 65536, (3, 5, 8, 9), dtype=np.uint16),
        "grey": rng.integers(0, 65536, (3, 8, 9), dtype=np.uint16),
        "bands": rng.integers(0, 256, (3, 8, 9, 4), dtype=np.uint8),
    }
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
    for name, array in arrays.items():
        source = hdf5(tmp_path / "x.h5", name)
        keys = source.listing().keys.tolist()
        found = [np.load(io.BytesIO(source.read(key)), allow_pickle=False) for key in keys]
        np.testing.assert_array_equal(np.stack(found), array)


def test_a_file_of_strangers_reads_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(1000))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["images"] = PIXELS
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["soft"] = h5py.SoftLink("/real")
        file["real"] = PIXELS
        file["outside"] = h5py.ExternalLink("other.h5", "/images")
        layout = h5py.VirtualLayout(PIXELS.shape, np.uint8)
        layout[:] = h5py.VirtualSource("other.h5", "images", PIXELS.shape)
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("raw", (1, 10, 10), np.uint8, external=[("secret", 0, 1000)])
        file.create_dataset("huge", (10**9, 8, 9, 3), np.uint8, chunks=(1, 8, 9, 3))
    for name in ("soft", "outside"):
        refused(tmp_path / "x.h5", "links to another object; refused", dataset=name)
    for name, kind in (("virtual", "virtual"), ("raw", "external")):
        message = f"/{name} is no plain dataset; refused: it is {kind}, so its values lie in other"
        refused(tmp_path / "x.h5", message, dataset=name)
    refused(tmp_path / "x.h5", "/huge claims .* bytes, but was never written", dataset="huge")


def test_a_damaged_chunk_fails_its_own_rows_only(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        images = file.create_dataset(
            "images", data=PIXELS, chunks=(1, 8, 9, 3), compression="gzip", fletcher32=True
        )
        at = images.id.get_chunk_info(2).byte_offset
    data = bytearray((tmp_path / "x.h5").read_bytes())
    data[at + 20] ^= 255
    (tmp_path / "x.h5").write_bytes(data)
    source = hdf5(tmp_path / "x.h5")
    for i, key in enumerate(source.listing().keys.tolist()):
        if i == 2:
            with image_fault(Status.DECODE_ERROR, "row 2 cannot be read"):
                source.read(key)
        else:
            np.testing.assert_array_equal(
                np.asarray(decode_pillow(source.read(key), POLICY)), PIXELS[i]
            )


def failures_of(source: Source) -> dict[int, tuple[Status, str]]:
    """Row -> status and message of every row that cannot be read."""
    failures = {}
    for row, key in enumerate(source.listing().keys.tolist()):
        try:
            source.read(key)
        except ImageFault as fault:
            failures[row] = fault.status, str(fault)
    return failures


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize(
    ("chunks", "written", "missing"),
    [
        ((1, 8, 9, 3), [(slice(0, 2),)], {2, 3, 4}),  # the writer stopped after two rows
        ((2, 8, 9, 3), [(slice(0, 3),)], {4}),  # row 3 lies in a chunk with row 2
        ((1, 4, 9, 3), [(slice(0, 3),), (3, slice(0, 4))], {3, 4}),  # the upper half of row 3
        ((5, 8, 9, 1), [(slice(0, 5), slice(0, 8), slice(0, 9), slice(0, 2))], {0, 1, 2, 3, 4}),
        ((2, 8, 9, 3), [(slice(3, 5),)], {0, 1}),  # the first chunk, with a fill value of its own
    ],
)
def test_rows_whose_chunks_were_never_written_are_missing(
    tmp_path: Path,
    chunks: tuple[int, ...],
    written: list[tuple[object, ...]],
    missing: set[int],
    compression: str | None,
) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        images = file.create_dataset(
            "images", PIXELS.shape, "u1", chunks=chunks, compression=compression, fillvalue=7
        )
        for part in written:
            images[part] = PIXELS[part]
    source = hdf5(tmp_path / "x.h5")
    failures = failures_of(source)
    assert set(failures) == missing
    for row, (status, message) in failures.items():
        assert status == Status.MISSING
        assert f"row {row} was never written" in message
    keys = source.listing().keys.tolist()
    for row in set(range(5)) - missing:
        if chunks != (2, 8, 9, 3):  # a chunk of two rows holds fill values of its own
            image = np.asarray(decode_pillow(source.read(keys[row]), POLICY))
            np.testing.assert_array_equal(image, PIXELS[row])


def test_encoded_rows_that_were_never_written_are_missing(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        fixed = file.create_dataset("fixed", (4,), "V5", chunks=(2,))
        fixed[:2] = np.array([b"image", b"bytes"], "V5")
        varying = file.create_dataset("varying", (4,), h5py.vlen_dtype(np.uint8), chunks=(2,))
        varying[0] = np.frombuffer(b"image", np.uint8)
    assert {row: f[0] for row, f in failures_of(hdf5(tmp_path / "x.h5", "fixed")).items()} == {
        2: Status.MISSING,
        3: Status.MISSING,
    }
    assert {row: f[0] for row, f in failures_of(hdf5(tmp_path / "x.h5", "varying")).items()} == {
        1: Status.EMPTY,
        2: Status.MISSING,
        3: Status.MISSING,
    }


@pytest.mark.parametrize("writer", ["MATLAB", "Octave"])
@pytest.mark.parametrize(
    "shape",  # as MATLAB's size() says, N last
    [(8, 9, 3, 5), (3, 8, 9, 5), (8, 9, 1, 5), (8, 9, 5)],
)
def test_arrays_of_matlab_have_their_axes_in_reversed_order(
    tmp_path: Path, writer: str, shape: tuple[int, ...]
) -> None:
    """MATLAB stores A(y, x, c, n), column-major, as a dataset of the reversed shape."""
    array = np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)
    with h5py.File(tmp_path / "x.mat", "w", userblock_size=512) as file:
        if writer == "MATLAB":
            name = "images"
            file[name] = array.transpose()
            file[name].attrs["MATLAB_class"] = np.bytes_(b"uint8")
        else:
            name = "images/value"
            file[name] = array.transpose()
            file["images"].attrs["OCTAVE_NEW_FORMAT"] = np.uint8(1)
    images = [array[..., n] for n in range(5)]
    if shape[0] == 3:
        images = [image.transpose(1, 2, 0) for image in images]
    expected = [np.broadcast_to(i if i.ndim == 3 else i[..., None], (8, 9, 3)) for i in images]
    np.testing.assert_array_equal(decoded(hdf5(tmp_path / "x.mat", name)), np.stack(expected))


def test_numbers_of_matlab_are_upright_as_well(tmp_path: Path) -> None:
    array = np.random.default_rng(2).standard_normal((8, 9, 5, 4)).astype(np.float32)
    with h5py.File(tmp_path / "x.mat", "w", userblock_size=512) as file:
        file["images"] = array.transpose()
        file["images"].attrs["MATLAB_class"] = np.bytes_(b"single")
        file["flat"] = np.zeros((1, 60), np.uint8)
        file["flat"].attrs["MATLAB_class"] = np.bytes_(b"uint8")
    source = hdf5(tmp_path / "x.mat")
    keys = source.listing().keys.tolist()
    found = [np.load(io.BytesIO(source.read(key)), allow_pickle=False) for key in keys]
    np.testing.assert_array_equal(np.stack(found, axis=-1), array)
    refused(tmp_path / "x.mat", r"expected of a file of MATLAB .* H x W x 3\|1 x N", dataset="flat")


def write_with_filter(path: Path, number: int, mask: int) -> None:
    """Write PIXELS in chunks that claim a filter which is left out where `mask` has its bit."""
    with h5py.File(path, "w") as file:
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_chunk((1, 8, 9, 3))
        settings.set_filter(number, h5py.h5z.FLAG_OPTIONAL, (1,))
        space = h5py.h5s.create_simple(PIXELS.shape)
        images = h5py.h5d.create(file.id, b"images", h5py.h5t.NATIVE_UINT8, space, settings)
        for row, pixels in enumerate(PIXELS):
            images.write_direct_chunk((row, 0, 0, 0), pixels.tobytes(), mask)


def test_a_missing_filter_is_one_error_that_names_it(tmp_path: Path) -> None:
    write_with_filter(tmp_path / "x.h5", 32099, mask=0)
    refused(tmp_path / "x.h5", "HDF5 filter 32099.*hdf5plugin.*HDF5_PLUGIN_PATH")
    write_with_filter(tmp_path / "y.h5", 32099, mask=1)  # an optional filter that was not applied
    np.testing.assert_array_equal(decoded(hdf5(tmp_path / "y.h5")), PIXELS)
    with h5py.File(tmp_path / "z.h5", "w") as file:
        file["images"] = PIXELS
        settings = {"compression": 32099, "allow_unknown_filter": True, "chunks": (2,)}
        file.create_dataset("labels", (5,), "i8", **settings)
        file["labels"].id.write_direct_chunk((0,), bytes(16), 0)
    refused(
        tmp_path / "z.h5",
        "/labels: the data are compressed with the HDF5 filter 32099",
        label_column="labels",
    )


def test_threads_read_rows_in_any_order(tmp_path: Path) -> None:
    many = np.random.default_rng(1).integers(0, 256, (200, 6, 7), dtype=np.uint8)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("images", data=many, chunks=(16, 6, 7), compression="gzip")
    source = hdf5(tmp_path / "x.h5")
    keys = source.listing().keys.tolist()
    random.Random(0).shuffle(keys)
    with ThreadPoolExecutor(8) as threads:
        for key, data in zip(keys, threads.map(source.read, keys), strict=True):
            assert data == b"P5\n7 6\n255\n" + many[int(key)].tobytes()
