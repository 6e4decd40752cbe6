"""Small data sets of every source, made with fixed seeds; and small models of libraries."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import shutil
import struct
import subprocess
import tarfile
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

NUM_IMAGES = 21
CLASSES = ("cat", "dog", "newt")


def make_inputs(folder: Path) -> None:
    """Write all data sets below a folder; what needs a missing package is left out."""
    photos = make_photos(folder / "photos")
    make_odd_images(folder / "odd")
    make_tables(folder, photos)
    make_shards(folder / "shards", photos)
    make_arrays(folder)
    make_torchvision(folder / "torchvision", photos)
    make_masks(folder / "masks", photos)
    make_slides(folder)
    make_videos(folder / "videos")
    for parent in Path(__file__).resolve().parents:
        if (odd := parent / "shared" / "data" / "odd-images").is_dir():
            (folder / "odd-images").symlink_to(odd)
            break
    for path in folder.rglob("*"):  # which does not enter odd-images
        # Images that were just written are compared by their bytes.
        os.utime(path, (1e9, 1e9), follow_symlinks=False)


def make_image(seed: int, width: int, height: int) -> Image.Image:
    """Return an image of squares of strong colours, and noise; its class decides the brightness."""
    rng = np.random.default_rng(seed)
    squares = rng.integers(0, 200, (4, 4, 3)) + 50 * (seed % 3) - 50
    pixels = squares.repeat(-(-height // 4), 0).repeat(-(-width // 4), 1)[:height, :width]
    noisy = pixels + rng.normal(0, 12, pixels.shape)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def make_photos(folder: Path) -> list[Path]:
    """Write images of several formats and sizes into three class folders; return their paths."""
    paths = []
    for i in range(NUM_IMAGES):
        suffix = ("jpg", "png", "webp", "jpg", "bmp", "tif", "gif")[i % 7]
        path = folder / CLASSES[i % 3] / f"{i:03d}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_image(i, 60 + 7 * i, 130 - 3 * i).save(path)
        paths.append(path)
    return paths


def make_odd_images(folder: Path) -> None:
    """Write images that are damaged, turned, of other modes, or no images."""
    folder.mkdir()
    image = make_image(50, 80, 64)
    jpeg, png = (_encoded(image, kind) for kind in ("JPEG", "PNG"))
    flipped = bytearray(png)
    flipped[len(png) // 2] ^= 0x10
    files = {
        "cut.jpg": jpeg[: len(jpeg) // 2],
        "cut.png": png[: len(png) // 2],
        "empty.jpg": b"",
        "flipped.png": bytes(flipped),
        "foreign.jpg": b"not an image",
        "garbage.jpg": jpeg[:300] + bytes(200) + jpeg[500:],
        "png-named.jpg": png,
        "sound.jpg": jpeg,
        "tail.jpg": jpeg + b"behind the end",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"):
        kind = "tif" if mode in ("CMYK", "F") else "png"
        odd = Image.fromarray(np.asarray(image)[..., 0].astype("<u2") * 257)
        if mode != "I;16":
            odd = image.convert(mode)
        odd.save(folder / f"mode-{mode.replace(';', '')}.{kind}")
    for mode in ("L", "CMYK"):
        image.convert(mode).save(folder / f"mode-{mode}.jpg")
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        image.save(folder / f"turned-{turn}.jpg", exif=exif)
    image.save(folder / "frames.gif", save_all=True, append_images=[image.rotate(90)])
    image.save(folder / "progressive.jpg", progressive=True, subsampling=0)
    Image.new("RGB", (3000, 2), "red").save(folder / "wide.png")
    Image.new("RGB", (1, 1), "blue").save(folder / "pixel.png")
    (folder / "dangling.jpg").symlink_to("nowhere.jpg")


def _encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def make_tables(folder: Path, photos: list[Path]) -> None:
    """Write photos.csv, photos.parquet with encoded images, boxes.csv and classes.json."""
    rng = np.random.default_rng(1)
    num = len(photos)
    columns: dict[str, list[object]] = {
        "path": [f"{path.parent.name}/{path.name}" for path in photos],
        "label": [path.parent.name for path in photos],
        "patient": [f"p{i // 2:02d}" for i in range(num)],
        "age": [round(20 + 5 * (i % 3) + x, 2) for i, x in enumerate(rng.normal(0, 3, num))],
        "tags": [";".join(t for t, n in (("a", 2), ("b", 3)) if i % n == 0) for i in range(num)],
        "use": [("train", "train", "test")[i // 3 % 3] for i in range(num)],
        "spare": [i % 2 == 0 for i in range(num)],
    }
    with (folder / "photos.csv").open("w", newline="") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    boxes = [[name, 3, 4, 40, 30] for name in columns["path"]]
    boxes += [[name, 10, 0, 32, 48] for name in columns["path"][::2]]
    boxes.append([columns["path"][0], 1000, 1000, 5, 5])
    with (folder / "boxes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "x", "y", "width", "height"], *boxes])
    numbers = {name: number for number, name in enumerate(CLASSES)}
    (folder / "classes.json").write_text(json.dumps(numbers))
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        return
    encoded = [path.read_bytes() for path in photos]
    table = pa.table({"image": encoded, "label": columns["label"], "age": columns["age"]})
    parquet.write_table(table, folder / "photos.parquet", row_group_size=8)


def make_shards(folder: Path, photos: list[Path]) -> None:
    """Write two shards of a WebDataset, and the first again as .tar.gz in zipped/."""
    (folder / "zipped").mkdir(parents=True)
    for number in range(2):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for path in photos[number::2]:
                label = str(CLASSES.index(path.parent.name)).encode()
                for suffix, content in ((path.suffix, path.read_bytes()), (".cls", label)):
                    member = tarfile.TarInfo(f"{path.stem}{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        (folder / f"shard-{number}.tar").write_bytes(buffer.getvalue())
        zipped = gzip.compress(buffer.getvalue(), mtime=0)
        (folder / "zipped" / f"shard-{number}.tar.gz").write_bytes(zipped)


def make_arrays(folder: Path) -> None:
    """Write pixels.h5 with pixels and encoded images, and arrays of five channels as .npy."""
    rng = np.random.default_rng(2)
    with h5py.File(folder / "pixels.h5", "w") as file:
        file["images"] = rng.integers(0, 256, (NUM_IMAGES, 40, 48, 3), dtype=np.uint8)
        file["labels"] = np.arange(NUM_IMAGES) % 3
        kind = h5py.vlen_dtype(np.uint8)
        file.create_dataset("encoded", (NUM_IMAGES,), dtype=kind)
        for i in range(NUM_IMAGES):
            file["encoded"][i] = np.frombuffer(_encoded(make_image(i, 50, 40), "PNG"), np.uint8)
    (folder / "bands").mkdir()
    for i in range(9):
        bands = rng.integers(0, 10000, (5, 40, 40)).astype(np.uint16)
        np.save(folder / "bands" / f"{i}.npy", bands)


def make_torchvision(folder: Path, photos: list[Path]) -> None:
    """Write MNIST, OxfordIIITPet and a folder for ImageFolder as torchvision downloads them."""
    rng = np.random.default_rng(3)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 12), ("t10k", 7)):
        pixels = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8).tobytes()
        head = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + pixels)
        labels = bytes(i % 10 for i in range(count))
        head = struct.pack(">4BI", 0, 0, 8, 1, count)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(head + labels)
    pets = folder / "oxford-iiit-pet"
    (pets / "annotations").mkdir(parents=True)
    (pets / "images").mkdir()
    lines = []
    for i in range(6):
        make_image(i, 50, 60).save(pets / "images" / f"breed_{i % 2}_{i}.jpg")
        lines.append(f"breed_{i % 2}_{i} {i % 2 + 1} 1 1")
    for split in ("trainval", "test"):
        (pets / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    for path in photos:
        place = folder / "classes" / "train" / path.parent.name / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)


def make_masks(folder: Path, photos: list[Path]) -> None:
    """Write a mask of two classes for each photo, by its brightness."""
    for path in photos:
        with Image.open(path) as image:
            grey = np.asarray(image.convert("L"))
        place = folder / path.parent.name / f"{path.stem}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((grey > 110).astype(np.uint8)).save(place)
    (folder.parent / "mask-classes.txt").write_text("dark\nbright\n")


def make_slides(folder: Path) -> None:
    """Write a tiled pyramid, and slide-boxes.csv with boxes of it, one of them outside."""
    try:
        import tifffile
    except ImportError:
        return
    pixels = np.asarray(make_image(70, 500, 400))
    (folder / "slides").mkdir()
    with tifffile.TiffWriter(folder / "slides" / "a.tif") as file:
        for level, kind in ((pixels, 0), (pixels[::2, ::2], 1)):
            file.write(
                level,
                photometric="rgb",
                tile=(128, 128),
                compression="zlib",
                subfiletype=kind,
                metadata=None,
            )
    boxes = [f"a.tif,{x},{y},96,96" for x in (0, 90, 250) for y in (0, 130, 1000)]
    text = "\n".join(["path,x,y,width,height", *boxes])
    (folder / "slide-boxes.csv").write_text(text)


def make_videos(folder: Path) -> None:
    """Write two videos of noise, if FFmpeg is here."""
    if shutil.which("ffmpeg") is None:
        return
    folder.mkdir()
    for seed in (1, 2):
        size = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", "64x48", "-r", "10", "-i", "-"]
        rng = np.random.default_rng(seed)
        frames = rng.integers(0, 256, (20, 6, 8, 3), dtype=np.uint8).repeat(8, 1).repeat(8, 2)
        command = ["ffmpeg", "-v", "error", *size, str(folder / f"{seed}.mp4")]
        subprocess.run(command, input=frames.tobytes(), check=True)
