"""Shards behind URLs: a web server with and without ranges, and a real S3 server (moto's)."""

from __future__ import annotations

import http.server
import os
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from made_shards import write_shards, write_tar
from object_server import upload
from tiny_model import extract

from featx.errors import DataError, MissingExtraError
from featx.sources import open_source
from featx.sources.webdataset import WebDatasetOptions
from featx.storage import s3_client
from featx.types import Source

pytestmark = pytest.mark.usefixtures("cache_folder")

fsspec = pytest.importorskip("fsspec", reason="the extra remote is not installed")
pytest.importorskip("aiohttp", reason="the extra remote is not installed")


class Handler(http.server.BaseHTTPRequestHandler):
    """Files of `server.folder`; a part of one where the server knows ranges."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        server: Any = self.server
        path = server.folder / self.path.lstrip("/")
        server.requests.append((self.command, self.path, self.headers.get("Range")))
        if server.broken or not path.is_file():
            self.send_error(500 if server.broken else 404)
            return
        data = path.read_bytes()
        total = len(data)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and server.ranges:
            first, last = int(asked[1]), min(int(asked[2]), total - 1)
            data = data[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first + server.shift}-{last}/{total}")
        else:
            self.send_response(200)
        if server.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if server.etags:
            self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        made: Any = running
        made.folder, made.ranges, made.broken, made.requests = tmp_path / "www", True, False, []
        made.etags, made.shift = True, 0
        made.daemon_threads = True
        made.url = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, args=(0.05,))
        thread.start()
        yield made
        running.shutdown()
        thread.join()


def shards(root: str) -> Source:
    return open_source(WebDatasetOptions(root=root))


def check_rows(source: Source, loose: Path, count: int) -> None:
    """Every row of `write_shards` is there, read by several threads."""
    listing = source.listing()
    assert len(listing) == count
    assert listing.labels.tolist() == [i % 3 for i in range(count)]
    keys = listing.keys.tolist()
    with ThreadPoolExecutor(4) as threads:
        for key, data in zip(keys, threads.map(source.read, keys), strict=True):
            assert data == (loose / os.fsdecode(key).rpartition("/")[2]).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_shards_of_a_web_server(tmp_path: Path, server: Any, ending: str) -> None:
    write_shards(tmp_path / "www" / "a", 12, 3, ending)
    url = f"{server.url}/a/train-{{000..002}}.{ending}"
    check_rows(shards(url), tmp_path / "www" / "loose", 12)
    server.requests.clear()
    listing = shards(url).listing()
    assert listing.keys[0] == f"train-000.{ending}/0000.png".encode()
    # The index is kept: what is asked is whether the shards are the same, and for one byte.
    assert sorted(method for method, _, _ in server.requests) == ["GET", "HEAD", "HEAD", "HEAD"]
    check_rows(shards(f"{server.url}/a/train-000.{ending}"), tmp_path / "www" / "loose", 4)


@pytest.mark.slow
def test_a_shard_that_was_replaced_on_the_server_is_indexed_again(
    tmp_path: Path, server: Any
) -> None:
    write_shards(tmp_path / "www", 6, 1)
    url = f"{server.url}/train-000.tar"
    assert len(shards(url).listing()) == 6
    write_shards(tmp_path / "www", 9, 1)
    assert len(shards(url).listing()) == 9


@pytest.mark.parametrize(("etags", "count"), [(True, 6), (False, 60)])
def test_a_shard_that_is_replaced_on_the_server_while_it_is_read(
    tmp_path: Path, server: Any, etags: bool, count: int
) -> None:
    server.etags = etags
    write_shards(tmp_path / "www", 6, 1)
    source = shards(f"{server.url}/train-000.tar")
    key = bytes(source.listing().keys[0])
    assert source.read(key)
    write_shards(tmp_path / "www", count, 1)
    with pytest.raises(OSError, match="changed while it was in use"):
        source.read(key)


@pytest.mark.parametrize("option", [{"ranges": False}, {"shift": 1}])
def test_a_web_server_without_ranges_is_told_at_once(
    tmp_path: Path, server: Any, option: dict[str, Any]
) -> None:
    write_shards(tmp_path / "www", 6, 1)
    vars(server).update(option)
    with pytest.raises(DataError, match=r"train-000\.tar: the web server does not answer requests"):
        shards(f"{server.url}/train-000.tar").listing()


def test_errors_of_a_web_server_name_the_shard(tmp_path: Path, server: Any) -> None:
    write_shards(tmp_path / "www", 6, 1)
    with pytest.raises(DataError, match=r"train-001\.tar is not there"):
        shards(f"{server.url}/train-{{000..001}}.tar").listing()
    with pytest.raises(DataError, match="does not list the files of a folder"):
        shards(f"{server.url}/").listing()
    source = shards(f"{server.url}/train-000.tar")
    key = source.listing().keys.tolist()[0]
    server.broken = True
    with pytest.raises(OSError, match="train-000"):  # the environment: never a row's fault
        source.read(key)
    server.broken = False
    assert source.read(key).startswith(b"\x89PNG")
    server.broken = True
    with pytest.raises(DataError, match=r"train-000\.tar is not there \(500"):
        shards(f"{server.url}/train-000.tar").listing()


def test_without_fsspec_a_url_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtraError, match=r'pip install "featx\[remote\]"'):
        shards("http://127.0.0.1:1/a.tar").listing()


@pytest.mark.usefixtures("in_tmp_path")
def test_features_from_a_web_server_are_those_from_the_disk(tmp_path: Path, server: Any) -> None:
    write_shards(tmp_path / "www", 9, 2)
    root = f"{server.url}/train-{{000..001}}.tar"
    far = extract({"name": "webdataset", "root": root})
    near = extract({"name": "webdataset", "root": str(tmp_path / "www")}, out="near")
    assert far.keys.tolist() == near.keys.tolist()
    assert far["conv"][:].tobytes() == near["conv"][:].tobytes()
    assert far.ok.all()


@pytest.mark.filterwarnings("ignore")  # of botocore and its peers: no business of ours
def test_shards_in_a_bucket(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # FSSPEC_S3_ENDPOINT_URL in the environment sets it. Rows are read by the settings of AWS.
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://127.0.0.1:1"})
    write_shards(tmp_path / "up" / "a", 12, 3)
    write_shards(tmp_path / "up" / "b", 12, 3, "tar.gz")
    root = f"s3://{bucket}/set"
    upload(tmp_path / "up", root)
    assert len(shards(f"s3://{bucket}").listing()) == 24
    check_rows(shards(f"{root}/a/train-{{000..002}}.tar"), tmp_path / "up" / "loose", 12)
    check_rows(shards(f"{root}/b/*.tar.gz"), tmp_path / "up" / "loose", 12)
    check_rows(shards(f"{root}/{{a,c}}/train-00?.tar"), tmp_path / "up" / "loose", 12)
    assert len(shards(f"{root}/**/train-00[12].*").listing()) == 16
    check_rows(shards(f"{root}/a"), tmp_path / "up" / "loose", 12)
    both = shards(root).listing()
    assert len(both) == 24
    assert both.keys[0] == b"a/train-000.tar/0000.png"
    assert both.keys[-1] == b"b/train-002.tar.gz/0011.png"
    source = shards(f"{root}/a")
    key = bytes(source.listing().keys[0])
    new = write_tar(tmp_path / "new.tar", {key.decode().partition("/")[2]: b"new"})
    s3_client.write(bucket, "set/a/train-000.tar", new.read_bytes())
    with pytest.raises(OSError, match="changed while it was in use"):
        source.read(key)
    assert shards(f"{root}/a").read(key) == b"new"
    with pytest.raises(DataError, match=r"train-003\.tar"):
        shards(f"{root}/a/train-{{000..003}}.tar").listing()
    with pytest.raises(DataError, match="no-such-bucket"):
        shards("s3://no-such-bucket/a.tar").listing()
