"""Kinds of TIFF: right to 1 of 255, or refused with a reason.

The files are written by the rules of TIFF 6.0 (`tiff_writer`), the right pixels are computed with
plain numpy, and tifffile confirms that the files hold the intended numbers.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiff_writer
import tifffile
from conftest import run_python, slow_except
from encoded_images import encode
from PIL import Image
from tiff_writer import Kind, write_tiff
from tiny_model import extract

from featx.errors import StoreMismatchError
from featx.images import ImagePolicy, image_sizes
from featx.images.decode import decode_array, decode_box_image
from featx.types import ImageFault, Status

pytest.importorskip("imagecodecs")

POLICY = ImagePolicy("apply", (10, 200, 30), 10**6)
HEIGHT, WIDTH = 20, 24
Y, X = np.mgrid[:HEIGHT, :WIDTH]
SHARES = np.stack(
    [
        X / (WIDTH - 1),
        Y / (HEIGHT - 1),
        (X + Y) / (WIDTH + HEIGHT - 2),
        X * 3 % WIDTH / (WIDTH - 1),
    ],
    axis=-1,
)
"""(H, W, 4) in [0, 1], different in every channel."""

NUMBERS = {
    **{(1, bits): 2.0**bits - 1 for bits in (1, 2, 4, 8, 12, 16)},
    (1, 32): 200.0, (2, 8): 100.0, (2, 16): 200.0, (2, 32): 200.0,
    (3, 16): 1.0, (3, 32): 1.0, (3, 64): 1.0,
}  # fmt: skip
"""(sample format, bits) -> the number that is white in the files of the grid."""

COLOURS: list[tuple[int, int, tuple[int, ...]]] = [
    (0, 1, ()), (1, 1, ()), (1, 2, (0,)), (1, 2, (1,)), (1, 2, (2,)), (1, 3, (0, 0)),
    (2, 3, ()), (2, 4, ()), (2, 4, (0,)), (2, 4, (1,)), (2, 4, (2,)),
]  # fmt: skip
"""(photometric interpretation, channels, ExtraSamples)."""


def says_white(sample_format: int, bits: int) -> bool:
    """Whether the bits of a file say which number is white."""
    return sample_format == 1 and bits < 32


def numbers_of(kind: Kind, channels: int, white: float) -> npt.NDArray[Any]:
    """(H, W, channels) numbers of a file, whose white is `white`."""
    shares = SHARES[:, :, :channels].copy()
    if kind.extra == (1,):
        shares[:, :, :-1] *= shares[:, :, -1:]
    if kind.photometric == 0:
        shares = 1 - shares
    return shares * white if kind.sample_format == 3 else np.rint(shares * white)


def expected_rgb(kind: Kind, numbers: npt.NDArray[Any], white: float) -> npt.NDArray[np.float64]:
    """(H, W, 3) in [0, 255] of the numbers that the file holds."""
    shares = numbers.astype(kind.dtype).astype(np.float64) / white
    num_colours = 3 if kind.photometric == 2 else 1
    colours, rest = shares[:, :, :num_colours], shares[:, :, num_colours:]
    if kind.photometric == 0:
        colours = 1 - colours
    if rest.shape[2] == 1 and kind.extra != (0,):
        background = np.array(POLICY.background) / 255
        colours = (colours if kind.extra == (1,) else colours * rest) + background * (1 - rest)
    return np.rint(np.broadcast_to(colours, (*colours.shape[:2], 3)).clip(0, 1) * 255)


def assert_right(data: bytes, expected: npt.NDArray[Any], policy: ImagePolicy = POLICY) -> None:
    found = decode_array(data, policy, None).astype(float)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1


def fault_of(data: bytes, policy: ImagePolicy = POLICY) -> ImageFault:
    with pytest.raises(ImageFault) as caught:
        decode_array(data, policy, None)
    return caught.value


@pytest.mark.parametrize(
    ("sample_format", "bits"),
    slow_except(NUMBERS, (1, 1), (1, 12), (1, 16), (1, 32), (3, 32)),
)
def test_every_kind_is_right_or_refused(sample_format: int, bits: int) -> None:
    white = NUMBERS[sample_format, bits]
    predictors = {1, 3} if sample_format == 3 else {1, 2} if bits in (8, 16, 32) else {1}
    packings = [(1, 1), *((8, predictor) for predictor in sorted(predictors))]
    num_right = 0
    for colours, planar, tile, packing in itertools.product(COLOURS, (1, 2), (None, 16), packings):
        photometric, channels, extra = colours
        order = "<>"[(channels + planar) % 2]
        kind = Kind(sample_format, bits, order, photometric, planar, tile, *packing, extra)
        numbers = numbers_of(kind, channels, white)
        data = write_tiff((numbers, kind))
        if bits >= 8 and bits != 12:
            read = tifffile.imread(io.BytesIO(data))
            read = read.transpose(1, 2, 0) if planar == 2 and channels > 1 else read
            assert np.array_equal(read.reshape(numbers.shape), numbers.astype(kind.dtype)), kind
        if says_white(sample_format, bits):
            assert_right(data, expected_rgb(kind, numbers, white))
        else:
            fault = fault_of(data)
            assert fault.status == Status.UNSUPPORTED
            assert "white is not stated: data.white=1" in str(fault)
            assert_right(data, expected_rgb(kind, numbers, white), replace(POLICY, white=white))
        num_right += 1
    assert num_right == len(COLOURS) * 4 * len(packings)


@pytest.mark.parametrize(("sample_format", "bits"), [(1, 16), (1, 32), (2, 16), (3, 32), (3, 64)])
@pytest.mark.parametrize("photometric", [0, 1, 2])
def test_smallest_and_largest_numbers_of_the_tags_are_black_and_white(
    sample_format: int, bits: int, photometric: int
) -> None:
    """They are stated by the file, so that data.white has no say."""
    code = {1: 4, 2: 9, 3: 12}[sample_format]
    channels = 3 if photometric == 2 else 1
    for black in (0.0, 100.0) if sample_format == 1 else (-50.0, 0.0, 100.0):
        tags = {340: (code, (black,) * channels), 341: (code, (black + 1000,) * channels)}
        values = tuple(
            (kind, tuple(map(int, numbers)) if code != 12 else numbers)
            for kind, numbers in tags.values()
        )
        kind = Kind(
            sample_format, bits, photometric=photometric, tags=dict(zip(tags, values, strict=True))
        )
        shares = SHARES[:, :, :channels]
        numbers = np.rint(black + 1000 * (1 - shares if photometric == 0 else shares))
        expected = np.broadcast_to(np.rint(shares * 255), (HEIGHT, WIDTH, 3))
        for policy in (POLICY, replace(POLICY, white=7.0)):
            assert_right(write_tiff((numbers, kind)), expected, policy)
    backwards = {340: (12, (5.0,)), 341: (12, (1.0,))}
    data = write_tiff((SHARES[:, :, :1], Kind(3, 32, photometric=1, tags=backwards)))
    assert "black is 5 and white 1" in str(fault_of(data))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("planar", [1, 2])
def test_cmyk(bits: int, planar: int) -> None:
    numbers = np.rint(SHARES * (2**bits - 1))
    data = write_tiff((numbers, Kind(1, bits, photometric=5, planar=planar)))
    shares = numbers / (2**bits - 1)
    if planar == 1:
        assert_right(data, np.rint(255 * (1 - shares[..., :3]) * (1 - shares[..., 3:])))
    else:
        assert "of CMYK, which cannot be read" in str(fault_of(data))


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("tile", [None, 16])
def test_palettes(bits: int, tile: int | None) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (3, 1 << bits))
    tags = {320: (3, tuple((colours * 257).ravel().tolist()))}
    index = np.rint(SHARES[..., :1] * (2**bits - 1))
    data = write_tiff((index, Kind(1, bits, photometric=3, tile=tile, tags=tags)))
    if bits == 16:
        assert "of a palette, which cannot be read" in str(fault_of(data))
    else:
        assert_right(data, colours[:, index[..., 0].astype(int)].transpose(1, 2, 0))


@pytest.mark.parametrize("subsampling", [(1, 1), (2, 2), None])
@pytest.mark.parametrize("compression", [1, 8])
def test_ycbcr(
    subsampling: tuple[int, int] | None, compression: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rgb = Image.fromarray((SHARES[..., :3] * 255).astype(np.uint8))
    pixels = np.array(rgb.convert("YCbCr"))
    tags: dict[int, tuple[int, tuple[float, ...]]] = {}
    if subsampling is not None:
        tags[530] = (3, subsampling)
    if subsampling != (1, 1):
        tags[278] = (3, (HEIGHT,))
    kind = Kind(1, 8, photometric=6, compression=compression, tags=tags)
    if subsampling != (1, 1):
        # Four values of brightness, and one of each colour for all of them.
        chroma = pixels[::2, ::2, 1:]
        pixels[..., 1:] = chroma.repeat(2, 0).repeat(2, 1)
        units = np.concatenate(
            [pixels[::2, ::2, :1], pixels[::2, 1::2, :1], pixels[1::2, ::2, :1],
             pixels[1::2, 1::2, :1], chroma], axis=2,
        )  # fmt: skip
        raw = tiff_writer.pack(units.tobytes(), kind)
        monkeypatch.setattr(tiff_writer, "blocks_of", lambda array, kind: [raw])
    data = write_tiff((pixels.astype(float), kind)) + bytes(9999)
    if subsampling != (1, 1) and compression == 1:
        assert "of YCbCr, which cannot be read" in str(fault_of(data))
    else:
        assert_right(data, np.asarray(Image.fromarray(pixels, "YCbCr").convert("RGB")))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("planar", [1, 2])
@pytest.mark.parametrize("bits", [8, 12, 16])
def test_big_tiff(order: str, planar: int, bits: int) -> None:
    kind = Kind(1, bits, order, planar=planar)
    numbers = numbers_of(kind, 3, 2.0**bits - 1)
    data = write_tiff((numbers, kind), is_big=True)
    assert_right(data, expected_rgb(kind, numbers, 2.0**bits - 1))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("compression", [1, 8])
@pytest.mark.parametrize("number", [(1, 8), (1, 16), (2, 16), (2, 32), (3, 16), (3, 32), (3, 64)])
def test_grey_with_a_scale_keeps_its_numbers(
    number: tuple[int, int], compression: int, order: str
) -> None:
    kind = Kind(*number, order, photometric=1, compression=compression)
    numbers = numbers_of(kind, 1, NUMBERS[number]).astype(kind.dtype)
    read = decode_array(write_tiff((numbers, kind)), replace(POLICY, channels=1), None)
    assert np.array_equal(read, numbers)


@pytest.mark.parametrize("compression", ["lzw", "packbits", "zstd", "lzma", "lerc", "jpegxl"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_compressions_are_right_or_refused(compression: str, dtype: type) -> None:
    if compression == "packbits" and dtype != np.uint8:
        pytest.skip("tifffile writes it for bytes only")
    white = {np.uint8: 255.0, np.uint16: 65535.0, np.float32: 1.0}[dtype]
    pixels = (np.rint(SHARES[..., :3] * 255) * (white / 255)).astype(dtype)
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, photometric="rgb", compression=compression, tile=(16, 16))
    policy = replace(POLICY, white=1.0)
    if compression in ("lerc", "jpegxl"):
        fault = fault_of(file.getvalue(), policy)
        assert fault.status == Status.UNSUPPORTED
        assert f"compression {compression.upper()} is not supported" in str(fault)
    else:
        assert_right(file.getvalue(), np.rint(SHARES[..., :3] * 255), policy)


# Pages

RED, GREY = np.full((HEIGHT, WIDTH, 3), (200, 0, 0)), np.full((9, 8, 3), 90)


@pytest.mark.parametrize("mark", [{254: (4, (1,))}, {255: (3, (2,))}, {254: (4, (4,))}])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("planar", [1, 2])
@pytest.mark.parametrize(
    "orientation",
    [
        {274: (3, (6,))},
        {700: (1, tuple(b'<x:xmpmeta tiff:Orientation="6"/>'))},
        {274: (3, (6,)), 700: (1, tuple(b"<tiff:Orientation>3</tiff:Orientation>"))},
    ],
    ids=["tag", "XMP", "tag and XMP"],
)
def test_a_thumbnail_or_mask_before_the_image(
    mark: dict[int, tuple[int, tuple[float, ...]]],
    bits: int,
    planar: int,
    orientation: dict[int, tuple[int, tuple[float, ...]]],
) -> None:
    small = (GREY, Kind(tags=mark))
    kind = Kind(1, bits, planar=planar, tags=orientation)
    numbers = SHARES[..., :3] * (2**bits - 1)
    data = write_tiff(small, (numbers, kind), small)
    expected = np.rot90(np.rint(SHARES[..., :3] * 255), -1)
    assert_right(data, expected)
    assert_right(data, np.rint(SHARES[..., :3] * 255), replace(POLICY, exif="ignore"))
    assert image_sizes(data, POLICY, None)[0] == (WIDTH, HEIGHT)
    raw = decode_array(data, replace(POLICY, channels=3), None)
    assert np.abs(raw / (2.0**bits - 1) * 255 - expected).max() <= 1
    lone = (GREY, Kind(tags=mark | {330: (4, (8,))}))
    assert "image that lies elsewhere" in str(fault_of(write_tiff(lone)))
    assert_right(write_tiff(small), GREY)


def test_several_pages_are_said() -> None:
    data = write_tiff(
        (RED, Kind()), (GREY, Kind()), (RED, Kind()), (GREY, Kind(tags={254: (4, (1,))}))
    )
    with pytest.warns(UserWarning, match="TIFF of 3 pages, of which the first is read"):
        assert_right(data, RED)
    with pytest.warns(UserWarning, match="of 3 pages"):
        decode_array(data, replace(POLICY, channels=3), None)


@pytest.mark.parametrize("options", [{"ome": True}, {"imagej": True}])
def test_channels_that_are_pages_are_refused(options: dict[str, Any]) -> None:
    planes = np.rint(SHARES[..., :3] * 255).astype(np.uint8).transpose(2, 0, 1)
    file = io.BytesIO()
    tifffile.imwrite(file, planes, photometric="minisblack", metadata={"axes": "CYX"}, **options)
    assert "its 3 channels are pages" in str(fault_of(file.getvalue()))
    numbers = decode_array(file.getvalue(), replace(POLICY, channels=3), None)
    assert np.array_equal(numbers, planes.transpose(1, 2, 0))


# Files that are incomplete or hostile


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("planar", [1, 2])
@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("compression", [1, 8])
def test_strips_and_tiles_that_are_not_stored(
    bits: int, planar: int, tile: int | None, compression: int
) -> None:
    """Sparse and cut files are no black images."""
    kind = Kind(1, bits, planar=planar, tile=tile, compression=compression)
    numbers = SHARES[..., :3] * (2**bits - 1)
    sound = write_tiff((numbers, kind))
    with tifffile.TiffFile(io.BytesIO(sound)) as file:
        page = file.pages[0]
        offsets, counts = list(page.dataoffsets), list(page.databytecounts)
    places = (324, 325) if tile else (273, 279)
    if len(offsets) == 1 or (compression == 1 and not tile and planar == 1):
        offsets = [8 + sum(counts[:i]) for i in range(len(counts))]
    for number in (0, len(offsets) - 1):
        for tag, values in zip(places, (offsets, counts), strict=True):
            holes = [0 if i == number else value for i, value in enumerate(values)]
            data = write_tiff((numbers, replace(kind, tags={tag: (4, tuple(holes))})))
            for policy in (POLICY, replace(POLICY, channels=3)):
                assert fault_of(data, policy).status == Status.TRUNCATED
        short = {
            tag: (4, tuple(values[:number]) or (0,))
            for tag, values in zip(places, (offsets, counts), strict=True)
        }
        assert fault_of(write_tiff((numbers, replace(kind, tags=short)))).status == Status.TRUNCATED


def bomb(num_tags: int = 1500, num_bytes: int = 4 << 20) -> bytes:
    """A TIFF whose tags overlap: each has all of its bytes."""
    entries = [(256, 4, 1, 60), (257, 4, 1, 60)]
    entries += [(40_000 + i, 1, num_bytes - 16, 16) for i in range(num_tags)]
    tags = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    data = b"II*\0" + struct.pack("<IH", 8, len(entries)) + tags + bytes(4)
    return data.ljust(num_bytes, b"\0")


def bombs() -> dict[str, bytes]:
    files = {"tiff": bomb()}
    sound = write_tiff((RED, Kind(tags={254: (4, (1,))})))
    [offset] = struct.unpack_from("<I", sound, 4)
    link = offset + 2 + 12 * struct.unpack_from("<H", sound, offset)[0]
    # The second page has them.
    second = bytearray(sound[:link] + struct.pack("<I", len(sound)) + sound[link + 4 :])
    for i in range(1500):
        entry = struct.pack("<HHII", 40_000 + i, 1, 4 << 20, 16)
        second += (struct.pack("<H", 1500) if i == 0 else b"") + entry
    files["second page"] = bytes(second + bytes(4)).ljust((4 << 20) + 16, b"\0")
    image = Image.new("RGB", (64, 64))
    for kind in ("PNG", "WEBP"):
        files[kind] = encode(image, kind, exif=b"Exif\0\0" + bomb())
    jpeg, exif = encode(image, "JPEG"), bomb()
    parts = [b"Exif\0\0" + exif[i : i + 65_000] for i in range(0, len(exif), 65_000)]
    segments = b"".join(b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in parts)
    files["JPEG"] = jpeg[:2] + segments + jpeg[2:]
    return files


def test_overlapping_tags_take_no_memory(tmp_path: Path) -> None:
    """4 MiB that would become 6 GiB: failures, in a process of at most 1 GiB more."""
    for name, data in bombs().items():
        (tmp_path / name).write_bytes(data)
    program = (
        "import pathlib, resource, sys; from featx.images import ImagePolicy, image_sizes\n"
        "from featx.images.decode import decode_array, decode_box_image\n"
        "from featx.types import ImageFault\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)\n"
        "for path in pathlib.Path(sys.argv[1]).iterdir():\n"
        "    for channels in (None, 3):\n"
        "        policy = ImagePolicy('apply', (0, 0, 0), 10**6, channels=channels)\n"
        "        for decode in (decode_array, decode_box_image, image_sizes):\n"
        "            try: decode(path.read_bytes(), policy, None)\n"
        "            except ImageFault as fault: print(path.name, fault, sep=': ')"
    )
    done = run_python("-W", "ignore", "-c", program, tmp_path)
    # EXIF data are left out by Pillow, with a warning; those images are sound.
    refused = [f"{name}: its tags overlap, to more bytes than it has"
               for name in ("second page", "tiff")]  # fmt: skip
    assert sorted(done.stdout.splitlines()) == sorted(6 * refused)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P"])
def test_a_file_that_ends_within_its_tags_is_no_other_image(mode: str) -> None:
    pixels = Image.fromarray((SHARES * 255).astype(np.uint8)).convert(mode)
    data = encode(pixels, "TIFF", compression="tiff_lzw", tiffinfo={274: 2})
    for channels in (None, len(pixels.getbands())):
        policy = replace(POLICY, channels=channels)
        whole = decode_array(data, policy, None) if mode != "P" or channels is None else None
        for size in range(len(data) - 200, len(data)):
            with contextlib.suppress(ImageFault):
                assert np.array_equal(decode_array(data[:size], policy, None), whole)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("count", [150, pytest.param(20_000, marks=pytest.mark.slow)])
def test_changed_headers_give_an_image_or_a_fault(count: int) -> None:
    rng = np.random.default_rng(count)
    kinds = [Kind(1, 16, planar=2), Kind(1, 8, tile=16), Kind(3, 32, compression=8, predictor=3)]
    files = [write_tiff((SHARES[..., :3], kind)) for kind in kinds]
    files.append(write_tiff((SHARES[..., :3], Kind(1, 12)), (RED, Kind()), is_big=True))
    outcomes = set()
    for _ in range(count):
        data = bytearray(files[rng.integers(len(files))])
        [start] = struct.unpack_from("<I", data, 4) if data[2] == 42 else [len(data) // 2]
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(start, len(data))] = rng.integers(256)
        for channels in (None, 3):
            policy = replace(POLICY, white=1.0, channels=channels)
            for decode in (decode_array, decode_box_image):
                try:
                    decode(bytes(data), policy, None)
                except ImageFault as fault:
                    outcomes.add(fault.status)
    assert len(outcomes) > 1


@pytest.mark.slow
def test_a_compression_that_needs_the_extra_names_it() -> None:
    """Planes of 16 bits with LZW, in a process without imagecodecs; deflate needs nothing."""
    program = (
        "import sys; sys.modules['imagecodecs'] = None\n"
        "from featx.images import ImagePolicy; from featx.images.decode import decode_array\n"
        "from featx.types import ImageFault\n"
        "try: print(decode_array(sys.stdin.buffer.read(), ImagePolicy('apply', (0, 0, 0), 10**6),"
        " None).shape)\n"
        "except ImageFault as fault: print(fault.status.name, fault)"
    )
    for compression, expected in (
        (5, 'UNSUPPORTED a TIFF of this compression needs pip install "featx[channels]"'),
        (8, str((*SHARES.shape[:2], 3))),
        (1, str((*SHARES.shape[:2], 3))),
    ):
        file = io.BytesIO()
        pixels = (SHARES[..., :3] * 65535).astype(np.uint16).transpose(2, 0, 1)
        tifffile.imwrite(
            file, pixels, photometric="rgb", planarconfig="separate", compression=compression
        )
        done = subprocess.run(
            [sys.executable, "-c", program], input=file.getvalue(), capture_output=True
        )
        assert done.stdout.decode().strip() == expected, done.stderr.decode()[-2000:]


@pytest.mark.usefixtures("in_tmp_path")
def test_a_run_reads_refuses_and_records(tmp_path: Path) -> None:
    """Every file gives the features of its 8-bit PNG, or is a row that says what is missing."""
    folder = tmp_path / "images"
    folder.mkdir()
    kinds = {
        "planes": (Kind(1, 16, planar=2), 65535.0),
        "bits12": (Kind(1, 12), 4095.0),
        "inverted": (Kind(1, 16, photometric=0), 65535.0),
        "floats": (Kind(3, 32), 1.0),
        "signed": (Kind(2, 16), 1.0),
    }
    for name, (kind, white) in kinds.items():
        numbers = numbers_of(kind, 1 if kind.photometric == 0 else 3, white)
        (folder / f"{name}.tif").write_bytes(write_tiff((numbers, kind)))
        rgb = expected_rgb(kind, numbers, white).astype(np.uint8)
        Image.fromarray(rgb).save(folder / f"{name}.png")
    (folder / "tags.tif").write_bytes(bomb())
    for options, refused in (
        ({}, {"floats.tif", "signed.tif", "tags.tif"}),
        ({"white": 1}, {"tags.tif"}),
    ):
        data = {"name": "folder", "root": str(folder), **options}
        store = extract(data, max_failures=1.0, out="white" if options else "store")
        names = [os.fsdecode(key) for key in store.keys]
        assert {name for name, ok in zip(names, store.ok, strict=True) if not ok} == refused
        rows = dict(zip(names, store["conv"][:].astype(float), strict=True))
        for name in {f"{kind}.tif" for kind in kinds} - refused:
            assert np.allclose(rows[name], rows[name.replace(".tif", ".png")], atol=0.01), name
    with pytest.raises(StoreMismatchError, match=r"data\.white"):
        extract({**data, "white": 255}, max_failures=1.0, out="white")
    failures = Path("store/failures.csv").read_text()
    assert "whose white is not stated: data.white=1" in failures
    assert "its tags overlap, to more bytes than it has" in failures
