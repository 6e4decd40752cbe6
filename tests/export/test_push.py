"""export.push: huggingface_hub uploads an export to a stand-in for the Hub on this machine."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_store import make_run
from tiny_model import run_job

from featx.errors import ConfigError, RunError

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.usefixtures("in_tmp_path", "packing_in_process")


class Hub(http.server.ThreadingHTTPServer):
    """The requests of an upload: create, preupload, LFS batch, PUT, commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.refused = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Requests(http.server.BaseHTTPRequestHandler):
    server: Hub

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.server.refused:
            return self.reply({"error": "Invalid username or password."}, 401)
        path = self.path.partition("?")[0]
        if path.startswith("/objects/"):
            self.server.objects[path.removeprefix("/objects/")] = body
            return self.reply({})
        if path == "/api/repos/create" or path.endswith("/commit/main"):
            self.server.tokens.add(self.headers.get("authorization"))
        if path == "/api/validate-yaml":
            return self.reply({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            return self.reply({"url": f"{self.server.url}/datasets/me/photos"})
        if path.endswith("/preupload/main"):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".parquet") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.reply({"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    **each,
                    "actions": {"upload": {"href": f"{self.server.url}/objects/{each['oid']}"}},
                }
                for each in json.loads(body)["objects"]
            ]
            return self.reply({"transfer": "basic", "objects": objects})
        if path.endswith("/commit/main"):
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                if entry["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.objects[value["oid"]]
            url = f"{self.server.url}/datasets/me/photos/commit/1"
            return self.reply(
                {"commitUrl": url, "commitOid": "1", "commitMessage": "", "success": 1}
            )
        return self.reply({}, 404)

    do_GET = do_POST = do_PUT = answer  # noqa: N815

    def reply(self, values: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("content-type", "application/vnd.git-lfs+json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_made_up")
        # The variable HF_HUB_DISABLE_XET is read when huggingface_hub is imported.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield server
        server.shutdown()
        thread.join()


def export(**options: Any) -> None:
    make_run(21, 8, failed=[3]).write(Path("store"))
    given = {"push": "me/photos", **options}
    assert run_job("export", store="store", export=given, out="out") == 0


@pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # huggingface_hub's own
@pytest.mark.parametrize("kind", ["parquet", "npy"])
def test_a_repository_gets_the_files_of_the_export_and_a_card(
    hub: Hub, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    export(format=kind)
    paths = [path for path in Path("out").rglob("*") if path.is_file()]
    local = {path.relative_to("out").as_posix(): path.read_bytes() for path in paths}
    card = hub.files.pop("README.md").decode()
    assert hub.files == {
        name: data for name, data in local.items() if name not in ("_export.json", ".lock")
    }
    assert all(hashlib.sha256(data).hexdigest() == oid for oid, data in hub.objects.items())
    assert hub.tokens == {"Bearer hf_made_up"}
    assert hub.created[0]["name"] == "photos"
    assert hub.created[0].get("visibility") == "private" or hub.created[0].get("private") is True
    header = yaml.safe_load(card.split("---")[1])
    assert ("configs" in header) == (kind == "parquet")
    if kind == "parquet":  # not those of an earlier export with other files
        (config,) = header["configs"]
        assert config["data_files"] == sorted(hub.files)
    assert "toy" in card
    assert str(Path.cwd()) not in card
    assert f"{hub.url}/datasets/me/photos" in capsys.readouterr().out


def test_a_refused_upload_leaves_the_export_complete(hub: Hub) -> None:
    hub.refused = True
    with pytest.raises(RunError, match=r"(?s)export\.push=me/photos: .*hf auth login"):
        export(format="npy")
    assert json.loads(Path("out/_export.json").read_text())["complete"]
    hub.refused = False
    assert run_job("export", store="store", export={"push": "me/photos"}, out="out") == 0
    assert "keys.npy" in hub.files


def test_a_hub_that_cannot_be_reached_is_an_error(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RunError, match=r"(?s)ConnectError.*is complete in"):
        export(format="npy")


def test_a_name_that_is_no_repository_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"export\.push=photos: .*me/photos"):
        export(push="photos")
    assert not Path("out").exists()
