"""Frames of videos: which, in which order, and what becomes of files that are none."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from image_faults import image_fault
from PIL import Image
from tiny_model import extract, run_job

from featx.config import from_composed, from_keywords
from featx.errors import ConfigError, DataError, MissingExtraError, StoreMismatchError
from featx.sources import open_source
from featx.sources.video import VideoOptions
from featx.sources.video_process import Videos
from featx.types import ImageFault, Status

pytest.importorskip("torchcodec", exc_type=(ImportError, RuntimeError, OSError))
import torchcodec

FPS = 10

needs_ffmpeg = pytest.mark.skipif(
    getattr(torchcodec, "ffmpeg_major_version", 0) is None, reason="FFmpeg is not installed"
)


def write_video(path: Path, num_frames: int, first: int = 0, fps: float = FPS) -> None:
    """Frame i is grey, 6 * (first + i) bright."""
    grey = 6 * (first + torch.arange(num_frames))
    frames = grey.to(torch.uint8)[:, None, None, None].expand(-1, 3, 48, 64).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    torchcodec.encoders.VideoEncoder(frames, frame_rate=fps).to_file(path)


def brightness(data: bytes) -> float:
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (64, 48)
        return float(np.asarray(image).mean())


@needs_ffmpeg
@pytest.mark.slow
def test_frames_by_time_in_any_order_and_files_that_are_no_videos(tmp_path: Path) -> None:
    write_video(tmp_path / "b" / "long.mp4", 36)
    write_video(tmp_path / "a" / "short.mkv", 3, first=20)
    (tmp_path / "a" / "none.mp4").write_bytes(b"no video at all, only text")
    (tmp_path / "a" / "list.mp4").write_bytes(b"#EXTM3U\n/etc/passwd\n")
    (tmp_path / "b" / "cut.mp4").write_bytes((tmp_path / "b" / "long.mp4").read_bytes()[:300])
    (tmp_path / "empty.mov").write_bytes(b"")
    source = open_source(VideoOptions(root=str(tmp_path), every_s=0.5))
    listing = source.listing()
    keys = listing.keys.tolist()
    assert keys == [
        b"a/list.mp4@00000.000",
        b"a/none.mp4@00000.000",
        b"a/short.mkv@00000.000",
        b"b/cut.mp4@00000.000",
        *(b"b/long.mp4@%05d.%03d" % divmod(500 * k, 1000) for k in range(8)),
        b"empty.mov@00000.000",
    ]
    assert [listing.classes[i] if i >= 0 else None for i in listing.labels[[0, 4, 12]]] == [
        "a", "b", None,
    ]  # fmt: skip
    assert listing.content_tags is not None
    assert listing.content_tags[4] == os.stat(tmp_path / "b" / "long.mp4").st_size  # noqa: PTH116
    order = np.random.default_rng(0).permutation(np.tile(np.arange(8), 2)).tolist()
    for k in order:
        assert brightness(source.read(keys[4 + k])) == pytest.approx(30 * k, abs=4)
    assert brightness(source.read(keys[2])) == pytest.approx(120, abs=4)
    for row, status in (
        (0, Status.UNSUPPORTED),
        (1, Status.UNSUPPORTED),
        (3, Status.DECODE_ERROR),
        (12, Status.EMPTY),
    ):
        with image_fault(status):
            source.read(keys[row])
    with image_fault(Status.TRUNCATED, "the video ends at"):
        source.read(b"b/long.mp4@00009.000")
    (tmp_path / "a" / "short.mkv").unlink()
    with pytest.raises(ImageFault, match="no such file"):
        source.read(keys[2])
    write_video(tmp_path / "b" / "long.mp4", 12)
    with pytest.raises(OSError, match="changed while it was in use"):
        source.read(keys[4])


@needs_ffmpeg
@pytest.mark.slow
@pytest.mark.parametrize("fps", [7, 24, 30, 60])
def test_every_frame_is_a_row_where_no_millisecond_divides_them(tmp_path: Path, fps: int) -> None:
    write_video(tmp_path / "clip.mp4", 36, fps=fps)
    source = open_source(VideoOptions(root=str(tmp_path), every_s=1 / fps))
    found = [brightness(source.read(key)) for key in source.listing().keys.tolist()]
    assert found == pytest.approx(6 * np.arange(36), abs=3)


@needs_ffmpeg
@pytest.mark.slow
def test_times_count_from_the_first_frame(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mkv", 12)
    data = (tmp_path / "clip.mkv").read_bytes()
    assert data.count(b"\xe7\x81\0") == 1  # the time of its only cluster, in milliseconds
    (tmp_path / "clip.mkv").write_bytes(data.replace(b"\xe7\x81\0", b"\xe7\x81\xff"))
    source = open_source(VideoOptions(root=str(tmp_path), every_s=1 / FPS))
    found = [brightness(source.read(key)) for key in source.listing().keys.tolist()]
    assert found == pytest.approx(6 * np.arange(12), abs=3)


@needs_ffmpeg
@pytest.mark.slow
def test_a_frame_is_shown_until_the_next_one_begins(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mkv", 12)
    data = (tmp_path / "clip.mkv").read_bytes()
    for frame in range(6, 12):  # a second later, as if nothing had moved on a screen for a while
        old, new = (b"\x81" + struct.pack(">h", 100 * frame + late) for late in (0, 1000))
        assert data.count(old) == 1
        data = data.replace(old, new)
    (tmp_path / "clip.mkv").write_bytes(data)
    source = open_source(VideoOptions(root=str(tmp_path), every_s=0.25))
    for time_s, frame in ((0.5, 5), (0.75, 5), (1.25, 5), (1.75, 7), (1.5, 5), (0.25, 2)):
        key = b"clip.mkv@%05d.%03d" % divmod(round(1000 * time_s), 1000)
        assert brightness(source.read(key)) == pytest.approx(6 * frame, abs=3)


class LateDecoder:
    """Finds nothing before the frame at 1.2 s, as FFmpeg in cut recordings of MPEG-2."""

    metadata = SimpleNamespace(
        width=8,
        height=8,
        num_frames=90,
        begin_stream_seconds=0.0,
        end_stream_seconds=9.0,
        duration_seconds=9.0,
        begin_stream_seconds_from_header=0.0,
        duration_seconds_from_header=9.0,
    )

    def __init__(self, path: str, **options: object) -> None: ...

    def get_frames_played_at(self, seconds: list[float]) -> SimpleNamespace:
        pixels = torch.zeros((1, 8, 8, 3), dtype=torch.uint8)
        return SimpleNamespace(data=pixels, pts_seconds=torch.tensor([1.2]))


def test_a_frame_that_ffmpeg_misses_is_not_another_one(tmp_path: Path) -> None:
    videos, path = Videos(LateDecoder, io.BytesIO()), tmp_path / "clip.mkv"
    path.write_bytes(b"\x1aE\xdf\xa3" + bytes(100))
    with image_fault(Status.DECODE_ERROR, "finds only a later frame"):
        videos.frame(str(path), 0.5, 100)
    assert videos.frame(str(path), 1.3, 100).startswith(b"P6")


def test_mpeg_is_refused_with_what_makes_another_container(tmp_path: Path) -> None:
    path = tmp_path / "disc.mpg"
    path.write_bytes(b"\0\0\1\xba" + bytes(100))
    with image_fault(Status.UNSUPPORTED, r"ffmpeg -i IN -c copy OUT\.mp4"):
        Videos(LateDecoder, io.BytesIO()).duration_s(str(path))


class ExactDecoder(LateDecoder):
    """Frames at 0.0, 0.1, ... 8.9 s."""

    def get_frames_at(self, indices: list[int]) -> SimpleNamespace:
        return self.get_frames_played_at([index / 10 for index in indices])

    def get_frames_played_at(self, seconds: list[float]) -> SimpleNamespace:
        pixels = torch.zeros((1, 8, 8, 3), dtype=torch.uint8)
        return SimpleNamespace(data=pixels, pts_seconds=torch.tensor(seconds).double())


def chunk(kind: bytes, content: bytes, claimed: int | None = None) -> bytes:
    """A chunk of an AVI that claims to hold so many bytes."""
    return struct.pack("<4sI", kind, len(content) if claimed is None else claimed) + content


AVI_HEADER = chunk(b"LIST", b"hdrl" + chunk(b"avih", bytes(56)))
AVI_INDEXED = chunk(b"LIST", b"hdrl" + chunk(b"LIST", b"strl" + chunk(b"indx", bytes(32))))


@pytest.mark.parametrize(
    ("chunks", "is_whole"),
    [
        (AVI_HEADER + chunk(b"LIST", b"movi" + bytes(100)) + chunk(b"idx1", bytes(16)), True),
        (
            AVI_HEADER + chunk(b"LIST", b"movi" + bytes(101)) + b"\0" + chunk(b"idx1", bytes(16)),
            True,
        ),
        (AVI_INDEXED + chunk(b"LIST", b"movi" + bytes(100)), True),
        (AVI_HEADER + chunk(b"LIST", b"movi" + bytes(100)), False),
        (AVI_HEADER + chunk(b"LIST", b"movi" + bytes(100), 2000), False),
        (AVI_HEADER + chunk(b"LIST", b"movi" + bytes(100), 2**32 - 1), False),
        (AVI_HEADER + chunk(b"LIST", b"movi" + bytes(100)) + chunk(b"idx1", b"", 16), False),
        (AVI_INDEXED + chunk(b"LIST", b"movi" + bytes(100), 2000), False),
    ],
)
def test_an_avi_that_ends_early_or_has_no_index_is_refused(
    tmp_path: Path, chunks: bytes, is_whole: bool
) -> None:
    """FFmpeg decodes it from frames that are no key frames, to other pixels."""
    path, videos = tmp_path / "clip.avi", Videos(ExactDecoder, io.BytesIO())
    path.write_bytes(struct.pack("<4sI4s", b"RIFF", 4 + len(chunks), b"AVI ") + chunks)
    if is_whole:
        assert videos.duration_s(str(path)) == 9
        assert videos.frame(str(path), 8.9, 100).startswith(b"P6")
        return
    for ask in (lambda: videos.duration_s(str(path)), lambda: videos.frame(str(path), 0, 100)):
        with image_fault(Status.TRUNCATED, r"no index; ffmpeg .* OUT\.mkv"):
            ask()


@pytest.mark.parametrize("is_long", [False, True])
def test_the_last_frames_of_an_mp4_that_ends_early_are_refused(
    tmp_path: Path, is_long: bool
) -> None:
    path = tmp_path / "clip.mp4"
    head = struct.pack(">I4s", 16, b"ftyp") + bytes(8) + struct.pack(">I4s", 8, b"moov")
    size = struct.pack(">I4sQ", 1, b"mdat", 1016) if is_long else struct.pack(">I4s", 1008, b"mdat")
    path.write_bytes(head + size + bytes(1000))
    whole = Videos(ExactDecoder, io.BytesIO())
    assert whole.frame(str(path), 8.9, 100) == whole.frame(str(path), 9.4, 100)
    path.write_bytes(head + size + bytes(999))
    cut = Videos(ExactDecoder, io.BytesIO())
    assert cut.frame(str(path), 7.29, 100).startswith(b"P6")
    for time_s in (7.3, 8.9, 9.4):
        with image_fault(Status.TRUNCATED, "ends early"):
            cut.frame(str(path), time_s, 100)


def test_frames_that_depend_on_damage_fail(tmp_path: Path) -> None:
    """Frames from 2 s to the key frame at 4 s depend on damage that FFmpeg meets before them."""
    path, messages = tmp_path / "clip.mkv", io.BytesIO()
    path.write_bytes(b"\x1aE\xdf\xa3" + bytes(100))

    class DamagedDecoder(ExactDecoder):
        def __init__(self, path: str, **options: object) -> None:
            self.position = 0.0

        def get_frames_played_at(self, seconds: list[float]) -> SimpleNamespace:
            key_frame = seconds[0] // 4 * 4
            # Frames between the last one and this are decoded, from the key frame at least.
            first = self.position if key_frame <= self.position <= seconds[0] else key_frame
            if first <= 2 <= seconds[0] < 4:
                messages.write(b"[h264 @ 0x55] error while decoding MB 0 12, bytestream -7\n")
            messages.write(b"[h264 @ 0x55] mmco: unref short failure\n")  # also of sound files
            self.position = seconds[0] + 0.1
            return super().get_frames_played_at(seconds)

    videos = Videos(DamagedDecoder, messages)
    for time_s in (0.5, 1.9, 2.0, 2.1, 3.9, 4.0, 3.0, 8.0, 1.0):
        if 2 <= time_s < 4:
            with image_fault(Status.DECODE_ERROR, "finds damage: error while decoding MB 0 12"):
                videos.frame(str(path), time_s, 100)
        else:
            assert videos.frame(str(path), time_s, 100).startswith(b"P6")


@needs_ffmpeg
@pytest.mark.slow
def test_damage_in_the_middle_of_a_video(tmp_path: Path) -> None:
    """Each frame is that of the undamaged video, or fails."""
    write_video(tmp_path / "whole" / "clip.mp4", 36)
    data = bytearray((tmp_path / "whole" / "clip.mp4").read_bytes())
    (tmp_path / "cut").mkdir()
    begin, end = data.index(b"mdat"), data.index(b"moov")
    last = end - (end - begin) // 4
    data[last : last + 20] = np.random.default_rng(0).bytes(20)
    (tmp_path / "cut" / "clip.mp4").write_bytes(data)
    whole, cut = (
        open_source(VideoOptions(root=str(tmp_path / name), every_s=1 / FPS))
        for name in ("whole", "cut")
    )
    failed = []
    for key in whole.listing().keys.tolist():
        try:
            assert cut.read(key) == whole.read(key)
        except ImageFault:
            failed.append(key)
    assert 0 < len(failed) < 36


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    ("matrix", "is_mirrored"),
    [((1, 0, 0, 1), False), ((0, 1, -1, 0), False), ((-1, 0, 0, -1), False), ((-1, 0, 0, 1), True)],
)
def test_an_mp4_that_is_shown_mirrored_is_refused(
    tmp_path: Path, version: int, matrix: tuple[int, int, int, int], is_mirrored: bool
) -> None:
    """torchcodec turns frames only, so that these would be upside down."""
    a, b, c, d = matrix
    head = bytes([version]) + bytes(39 + 12 * version)
    content = head + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1) + bytes(8)
    for kind in (b"tkhd", b"trak", b"moov"):
        content = struct.pack(">I4s", 8 + len(content), kind) + content
    path = tmp_path / "clip.mov"
    path.write_bytes(struct.pack(">I4s", 16, b"ftyp") + bytes(8) + content)
    if not is_mirrored:
        assert Videos(ExactDecoder, io.BytesIO()).duration_s(str(path)) == 9
        return
    with image_fault(Status.UNSUPPORTED, r"mirrors the frames; ffmpeg"):
        Videos(ExactDecoder, io.BytesIO()).duration_s(str(path))


def test_a_header_that_states_another_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "clip.mkv"
    path.write_bytes(b"\x1aE\xdf\xa3" + bytes(100))
    metadata = SimpleNamespace(**vars(LateDecoder.metadata))
    monkeypatch.setattr(ExactDecoder, "metadata", metadata)
    metadata.duration_seconds_from_header = 8.4
    opened: list[str] = []

    def decoder(path: str, **options: object) -> ExactDecoder:
        opened.append(path)
        return ExactDecoder(path)

    videos = Videos(decoder, io.BytesIO())
    for _ in range(2):
        with pytest.raises(ImageFault, match=r"last 9\.000 s, .* header says 8\.400 s; ffmpeg"):
            videos.frame(str(path), 0, 100)
    assert len(opened) == 1, "all its packets are read once"
    metadata.begin_stream_seconds_from_header = 5.0
    metadata.duration_seconds_from_header = 14.0
    assert Videos(ExactDecoder, io.BytesIO()).duration_s(str(path)) == 9


@pytest.mark.slow
def test_a_frame_that_crashes_or_hangs_its_process_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FFmpeg is played by a stand-in whose video says what it does."""
    fake = tmp_path / "fake" / "torchcodec"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "decoders.py").write_text(
        "import ctypes, time, torch\n"
        "from types import SimpleNamespace as Of\n"
        "class VideoDecoder:\n"
        "    metadata = Of(width=2, height=2, begin_stream_seconds=0.0, num_frames=3,\n"
        "        begin_stream_seconds_from_header=0.0,\n"
        "        end_stream_seconds=3.0, duration_seconds=3.0, duration_seconds_from_header=3.0)\n"
        "    def __init__(self, path, **options): pass\n"
        "    def get_frames_played_at(self, seconds):\n"
        "        if int(seconds[0]) == 1: ctypes.string_at(0)\n"
        "        if int(seconds[0]) == 2: time.sleep(100)\n"
        "        data = torch.full((1, 2, 2, 3), 7, dtype=torch.uint8)\n"
        "        return Of(data=data, pts_seconds=torch.zeros(1))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "clip.mp4").write_bytes(b"\0\0\0\0ftyp and so on")
    source = open_source(VideoOptions(root=str(tmp_path / "set"), timeout_s=1))
    keys = source.listing().keys.tolist()
    assert len(keys) == 3
    assert source.read(keys[0]).endswith(bytes([7] * 12))
    for key, status in ((keys[1], Status.CRASHES_DECODER), (keys[2], Status.TIMEOUT)):
        with image_fault(status, "also in a subprocess"):
            source.read(key)
        assert source.read(keys[0]).endswith(bytes([7] * 12))
    with pytest.raises(DataError, match=r"clip\.mp4 claims to last 3 s, more frames than its"):
        open_source(VideoOptions(root=str(tmp_path / "set" / "clip.mp4"), every_s=0.001)).listing()
    (fake / "__init__.py").write_text("ffmpeg_major_version = None")  # as 0.17 has it without
    with pytest.raises(MissingExtraError, match="apt install ffmpeg: torchcodec finds none"):
        open_source(VideoOptions(root=str(tmp_path / "set"))).listing()
    (fake / "decoders.py").write_text("raise RuntimeError('Could not load libtorchcodec')")
    with pytest.raises(MissingExtraError, match="apt install ffmpeg: Could not load"):
        open_source(VideoOptions(root=str(tmp_path / "set"))).listing()


@needs_ffmpeg
@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
def test_a_run_a_resume_and_a_changed_video() -> None:
    write_video(Path("set/x/1.mp4"), 36)
    write_video(Path("set/y/2.mp4"), 36, first=3)
    data = {"name": "video", "root": "set", "every_s": 0.4}
    whole = extract(data, out="whole", pack=False)
    store = extract(data, pack=False)
    assert len(store) == 18
    assert store.ok.all()
    assert store.classes == ("x", "y")
    Path("store/parts/part-000002.h5").unlink()
    again = extract(data, pack=False)
    assert again["conv"][:].tobytes() == whole["conv"][:].tobytes()
    assert run_job("verify", store="store", verify={"reextract_rows": 4}) == 0
    with pytest.raises(ConfigError, match="frames of videos, and webdataset holds images"):
        run_job("export", store="store", export={"format": "webdataset"}, out="out")
    write_video(Path("set/y/2.mp4"), 36, first=5)
    with pytest.raises(StoreMismatchError, match=r"9 images have changed .* y/2\.mp4@00000\.000, "):
        extract(data)


def test_times_that_are_none() -> None:
    for every_s in (0, -1, float("inf")):
        with pytest.raises(ConfigError, match=r"data\.every_s="):
            VideoOptions(root="x", every_s=every_s)
    with pytest.raises(ConfigError, match=r"data\.every_s has an effect with data=video only"):
        from_composed(from_keywords({"data": {"name": "folder", "root": "x", "every_s": 2}}))
