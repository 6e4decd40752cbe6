"""job=verify: what it finds, what it says, and what verify.repair=true brings back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import Stored, slow_except
from made_store import dataset_digests, flip_byte_of_row
from tiny_model import MODEL, extract_in_steps, job_output, job_result, run_job, write_image
from tiny_model import extract_six_parts as extract

import featx
from featx.errors import ConfigError, ModelError, StoreError, StoreMismatchError
from featx.jobs import verify
from featx.storage import AtomicFolder
from featx.store import DamageRecord, layout, result_json, store_status
from featx.types import Status

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def look(**keys: Any) -> tuple[int, Any]:
    """Exit code and JSON of job=verify."""
    return job_output("verify", **{"out": "store", **keys})


def test_exit_codes_and_json_of_sound_incomplete_and_damaged(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(pack=False)
    code, found = look()
    assert code == 0
    assert found["complete"] is True
    assert (found["rows"], found["files"], found["missing"], found["damages"]) == (21, 6, [], [])
    Path("store/parts/part-000002.h5").unlink()
    code, found = look()
    assert code == verify.EXIT_INCOMPLETE
    assert found["missing"] == ["part-000002.h5"]
    flip_byte_of_row(Path("store/parts/part-000003.h5"), "conv", 2)
    code, found = look()
    assert code == verify.EXIT_DAMAGED
    assert found["complete"] is False
    assert found["damages"] == [
        {
            "file": "part-000003.h5",
            "what": "/features/conv differs from its checksum at row 12",
            "rows": [12, 16],
        }
    ]
    assert run_job("verify", out="store") == verify.EXIT_DAMAGED
    text = capsys.readouterr().out
    assert "part-000003.h5: /features/conv differs from its checksum at row 12" in text
    assert "1 part: part-000002.h5" in text
    assert "verify.repair=true" in text


@pytest.mark.slow
def test_verify_and_the_repair_of_a_sound_store_write_nothing(stored: Stored) -> None:
    stored()

    def state() -> dict[str, tuple[int, bytes]]:
        files = [p for p in Path("store").rglob("*") if p.is_file() and p.name != ".lock"]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    assert run_job("verify", out="store", verify={"reextract_rows": 21}) == 0
    code, found = look(verify={"repair": True})
    assert code == 0
    assert "repaired" not in found
    assert state() == before


def test_no_store_and_a_file_for_a_sample_are_clear_errors(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StoreError, match=r"nowhere holds no store: there is no featx\.json in it"):
        run_job("verify", store="nowhere")
    stored()
    assert run_job("verify", store="store/features.h5") == 0
    with pytest.raises(
        ConfigError, match=r"verify\.reextract_rows and verify\.repair need the store's"
    ):
        run_job("verify", store="store/features.h5", verify={"reextract_rows": 3})
    os.truncate("store/features.h5", 3000)
    assert run_job("verify", store="store/features.h5") == verify.EXIT_DAMAGED
    assert "In the folder of its store verify.repair=true" in capsys.readouterr().out


@pytest.mark.slow
def test_a_truncated_packed_file_is_damage_and_is_computed_again(stored: Stored) -> None:
    stored()
    before = dataset_digests("store")
    os.truncate("store/features.h5", 3000)
    code, found = look()
    assert code == verify.EXIT_DAMAGED
    assert "features.h5: it cannot be read" in "{file}: {what}".format(**found["damages"][0])
    code, found = look(verify={"repair": True})
    assert code == 0
    assert found["repaired"]["rows"] == 21
    assert dataset_digests("store") == before


@pytest.mark.slow
def test_a_flipped_byte_costs_one_part_of_one_layer(
    photos: Path, computed: list[tuple[frozenset[str], int]]
) -> None:
    """Two runs made the store; the damage in the second one's layer leaves the first one alone."""
    extract(photos)
    extract(photos, layers=["conv", "pool"])
    before = dataset_digests("store")
    flip_byte_of_row(Path("store/features.h5"), "pool", 13)
    computed.clear()
    code, found = look(verify={"repair": True})
    assert code == 0
    assert {layers for layers, _ in computed} == {frozenset({"pool"})}
    # A chunk of the packed file is a part at the most.
    assert [start for _, start in computed] == [12]
    assert found["repaired"]["rows"] == 4
    assert found["damages"] == []
    assert dataset_digests("store") == before
    assert not Path("store/parts").exists()
    assert look(verify={"reextract_rows": 21})[1]["reextracted"]["identical"] == 21


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flipped", "truncated", "swapped", "gone"])
def test_a_damaged_part_of_a_store_in_parts_is_extracted_again(
    stored: Stored,
    computed: list[tuple[frozenset[str], int]],
    how: str,
) -> None:
    stored(pack=False)
    parts = sorted(Path("store/parts").iterdir())
    before = {path.name: dataset_digests(path) for path in parts}
    part = parts[2]
    if how == "flipped":
        flip_byte_of_row(part, "conv", 1)
    elif how == "truncated":
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])  # its rows as well
    elif how == "swapped":
        shutil.copy(parts[1], part)
    else:
        part.unlink()
    assert look()[0] == (verify.EXIT_INCOMPLETE if how == "gone" else verify.EXIT_DAMAGED)
    computed.clear()
    code, found = look(verify={"repair": True})
    assert code == 0
    assert [start for _, start in computed] == [8]
    assert found["repaired"]["rows"] == 4
    assert {path.name: dataset_digests(path) for path in parts} == before
    assert not Path("store/features.h5").exists()
    assert not Path("store", layout.DAMAGED).exists()


@pytest.mark.parametrize(
    ("pack", "codec"), [pytest.param(True, "none", marks=pytest.mark.slow), (False, "gzip")]
)
def test_of_a_part_with_a_damaged_chunk_only_its_rows_are_extracted_again(
    photos: Path,
    computed: list[tuple[frozenset[str], int]],
    on_batch: list[Callable[[Any], None]],
    set_chunk_bytes: Callable[[int], None],
    pack: bool,
    codec: str,
) -> None:
    """A part has 16 rows and a chunk of `conv` two; the repair fails before it computes them."""
    set_chunk_bytes(600)
    keys: dict[str, Any] = {"part_rows": 16, "layers": ["conv", "pool"], "codec": codec}
    extract(photos, pack=pack, **keys)
    path = Path("store/features.h5" if pack else "store/parts/part-000000.h5")
    before, whole = dataset_digests(path), featx.open("store")["conv"][:]
    with h5py.File(path, "r+") as file:
        assert file["features/conv"].chunks[0] == 2
        file["features/conv"][9] = 0
    computed.clear()
    on_batch.append(raises_runtime_error)
    with pytest.raises(RuntimeError):
        look(verify={"repair": True})
    on_batch.clear()
    conv = featx.open("store")["conv"]
    assert conv[:8].tobytes() == whole[:8].tobytes()
    assert conv[10:].tobytes() == whole[10:].tobytes()
    with pytest.raises(StoreError, match="rows 8 to 9"):
        conv[8:10]
    assert look()[0] == verify.EXIT_DAMAGED
    output = job_result("status", out="store")
    assert (output["rows"] - output["rows_done"], output["parts"] - output["parts_done"]) == (2, 1)
    extract(photos, pack=pack, **keys)
    assert computed == [(frozenset({"conv", "pool"}), 8)]
    assert dataset_digests(path) == before
    assert look()[0] == 0


def raises_runtime_error(*args: Any) -> None:
    raise RuntimeError


@pytest.mark.parametrize("pack", slow_except([True, False], True))
@pytest.mark.parametrize("name", ["featx.json", "samples.h5"])
@pytest.mark.parametrize("how", slow_except(["lost", "damaged", "other"], "lost", "other"))
def test_a_lost_manifest_or_listing_is_restored(
    stored: Stored, computed: list[tuple[frozenset[str], int]],
    name: str, pack: bool, how: str,
) -> None:  # fmt: skip
    """A manifest is restored without the images, which are elsewhere meanwhile."""
    photos = stored(pack)
    path = Path("store", name)
    before = path.read_bytes()
    if how == "lost":
        path.unlink()
    elif how == "damaged":
        path.write_bytes(before[: len(before) // 2])
    elif name == "featx.json":
        path.write_bytes(before.replace(b'"part_rows": 4', b'"part_rows": 8'))
    else:
        with h5py.File(path, "r+") as file:
            file["label"][4] = 1 - file["label"][4]
    assert not path.exists() or path.read_bytes() != before
    assert look()[0] == verify.EXIT_DAMAGED
    computed.clear()
    if name == "featx.json":
        photos.rename("elsewhere")
    code, found = look(verify={"repair": True})
    assert code == 0, found
    assert found["repaired"]["rows"] == 0
    assert computed == []
    assert Path("store/features.h5").exists() == pack
    if name == "featx.json":
        assert path.read_bytes() == before
        Path("elsewhere").rename(photos)
    assert look(verify={"reextract_rows": 21})[1]["reextracted"]["identical"] == 21


def test_other_files_of_a_store_are_restored_without_the_model(
    stored: Stored, computed: list[tuple[frozenset[str], int]]
) -> None:
    stored()
    before = dataset_digests("store")
    with h5py.File("store/features.h5", "r+") as file:
        file["label"][3] = 77
    assert look()[0] == verify.EXIT_DAMAGED
    computed.clear()
    assert look(verify={"repair": True})[0] == 0
    assert computed == []
    assert dataset_digests("store") == before


def test_a_probe_that_was_killed_is_no_damage_of_rows(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its predictions are new, and probe.json is of the probe before."""
    stored()
    root = Path("store")
    (root / "probe").mkdir()
    (root / "probe/predictions.csv").write_bytes(b"of the second probe")
    entry = {"file": "probe/predictions.csv", "sha256": "of the first probe"}
    (root / "probe.json").write_bytes(result_json({"predictions": entry}, indent=1))
    code, found = look()
    assert (code, found["images"]["compared"]) == (verify.EXIT_DAMAGED, 21)
    assert run_job("verify", out="store") == verify.EXIT_DAMAGED
    text = " ".join(capsys.readouterr().out.split())
    assert "predictions.csv differs from the sha256 in it" in text
    assert "The rows are sound. The job that made a damaged result, such as job=probe" in text
    assert "extracts the rows" not in text
    assert look(verify={"repair": True})[0] == 0
    assert (root / "probe.json.damaged").exists()


def test_a_repair_that_was_killed_after_the_last_row_ends_when_it_is_given_again(
    stored: Stored,
) -> None:
    """It had replaced the damaged part, and not yet brought the files beside it up to date."""
    stored(pack=False)
    failures = Path("store/failures.csv").read_bytes()
    record = DamageRecord(frozenset(["part-000001.h5"]), {1: [(4, 8)]})
    record.write(AtomicFolder(Path("store")), DamageRecord())
    Path("store/failures.csv").write_text("of the damaged store")
    assert store_status(Path("store")).rows_done == 17
    assert look(verify={"repair": True})[0] == 0
    assert store_status(Path("store")).complete
    assert not Path("store/damaged.json").exists()
    assert Path("store/failures.csv").read_bytes() == failures


def test_a_record_of_damage_without_an_entry_is_deleted(tmp_path: Path) -> None:
    """It was copied from a bucket, where it stays."""
    path = tmp_path / layout.DAMAGED
    path.write_bytes(result_json({"files": [], "rows": {}}, indent=2))
    before = DamageRecord.read(tmp_path)
    assert not before.is_due
    DamageRecord().write(AtomicFolder(tmp_path), before)
    assert not path.exists()


def test_a_file_that_is_no_part_of_the_store_goes_and_parts_stay_parts(stored: Stored) -> None:
    stored(pack=False)
    shutil.copy("store/parts/part-000001.h5", "store/parts/part-000099.h5")
    assert look()[0] == verify.EXIT_DAMAGED
    assert look(verify={"repair": True})[0] == 0
    assert len(list(Path("store/parts").iterdir())) == 6
    assert not Path("store/features.h5").exists()


def test_repair_without_the_image_records_the_row_and_keeps_the_others(stored: Stored) -> None:
    """With the image back, retry_failed=true makes the store that it was."""
    photos = stored()
    before = dataset_digests("store")
    whole = featx.open("store")["conv"][:]
    flip_byte_of_row(Path("store/features.h5"), "conv", 9)
    key = str(featx.open("store").keys[9])
    (photos / key).rename("elsewhere.png")
    code, found = look(verify={"repair": True})
    assert code == 0, found
    store = featx.open("store")
    assert store.status.tolist() == [0] * 9 + [Status.DAMAGED_AND_IMAGE_GONE] + [0] * 11
    assert store.failures[0]["status"] == "damaged and image gone"
    assert np.isnan(store["conv"][9]).all()
    rest = np.arange(21) != 9
    assert store["conv"][rest].tobytes() == whole[rest].tobytes()
    (photos / key).symlink_to("nowhere.png")
    assert extract(photos, retry_failed=True).status[9] == Status.DAMAGED_AND_IMAGE_GONE
    (photos / key).unlink()
    Path("elsewhere.png").rename(photos / key)
    extract(photos, retry_failed=True)
    assert dataset_digests("store") == before


def test_a_repair_leaves_layers_of_two_images_in_parts(photos: Path) -> None:
    """An image was emptied before a layer was added, so its row has failed in that layer only."""
    extract(photos, layers=["conv"])
    min(photos.rglob("*.png")).write_bytes(b"")
    before = extract(photos, layers=["pool"], max_failures=1.0)["pool"][:].tobytes()
    assert Path("store/features.h5").exists()
    flip_byte_of_row(Path("store/parts/part-000007.h5"), "pool", 2)
    code, found = look(verify={"repair": True})
    assert (code, found["damages"]) == (0, [])
    assert featx.open("store")["pool"][:].tobytes() == before


def test_other_weights_are_refused(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extract(photos, model={**MODEL, "weights": "default"}, seed=3)
    monkeypatch.setattr("zoo.TwoStageConvNet.__init__.__defaults__", (None, 2.0, 0.0, ""))
    with pytest.raises(StoreMismatchError, match=r"cannot be compared.*\n +weights_sha256: the"):
        look(verify={"reextract_rows": 3})
    flip_byte_of_row(Path("store/features.h5"), "conv", 9)
    with pytest.raises(StoreMismatchError, match="weights_sha256: the store has"):
        look(verify={"repair": True})


@pytest.mark.slow
def test_repair_of_a_store_that_grew_by_rows_and_layers(photos: Path) -> None:
    extract_in_steps(photos)
    before = dataset_digests("store")
    flip_byte_of_row(Path("store/features.h5"), "conv", 2)
    flip_byte_of_row(Path("store/features.h5"), "pool", 6)
    flip_byte_of_row(Path("store/features.h5"), "pool", 15)
    code, found = look(verify={"repair": True})
    assert code == 0, found
    assert dataset_digests("store") == before
    assert look(verify={"reextract_rows": 21})[1]["reextracted"]["identical"] == 21


@pytest.mark.slow
def test_a_lost_file_of_weights_is_named(photos: Path, tmp_path: Path) -> None:
    import torch
    from zoo import TwoStageConvNet

    torch.save(TwoStageConvNet().state_dict(), tmp_path / "weights.pth")
    extract(photos, model={**MODEL, "weights": str(tmp_path / "weights.pth")})
    assert look(verify={"reextract_rows": 5})[0] == 0
    (tmp_path / "weights.pth").unlink()
    with pytest.raises(ModelError, match=r"weights\.pth"):
        look(verify={"reextract_rows": 5})
    assert look()[0] == 0


@pytest.mark.slow
def test_new_images_do_not_keep_a_store_from_being_repaired(stored: Stored) -> None:
    photos = stored()
    before = dataset_digests("store")
    flip_byte_of_row(Path("store/features.h5"), "conv", 9)
    write_image(photos / "cat" / "001.png", 99)
    code, found = look(verify={"repair": True})
    assert code == 0, found
    assert dataset_digests("store") == before


@pytest.mark.parametrize("damage", ["row", "metadata"])
def test_what_cannot_be_extracted_again_is_refused_before_anything_moves(
    stored: Stored, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """Metadata cost no row, so no model is needed; the message names the code of the model."""
    stored()
    before = dataset_digests("store")
    if damage == "row":
        flip_byte_of_row(Path("store/features.h5"), "conv", 9)
    else:
        with h5py.File("store/features.h5", "r+") as file:
            file["chunk_table"][60] ^= 1
    damaged = Path("store/features.h5").read_bytes()
    assert run_job("verify", out="store") == verify.EXIT_DAMAGED
    text = capsys.readouterr().out
    assert "verify.repair=true model=custom model.factory=zoo:TwoStageConvNet extracts" in text
    packaged = {"name": "efficientnet_lite0", "library": "packaged"}
    options = {"out": "store", "verify": {"repair": True}, "model": packaged}
    if damage == "metadata":
        assert run_job("verify", **options) == 0
        assert dataset_digests("store") == before
        return
    with pytest.raises(ConfigError, match=r"model\.factory=zoo:TwoStageConvNet"):
        run_job("verify", **options)
    assert Path("store/features.h5").read_bytes() == damaged
    assert not Path("store", layout.DAMAGED).exists()
    assert not Path("store/parts").exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_repair_that_was_killed_before_the_pack_packs_when_it_is_given_again(
    photos: Path,
    on_open: list[Callable[[str], None]],
    is_packed: bool,
) -> None:
    extract(photos, pack=is_packed)
    file = Path("store/features.h5" if is_packed else "store/parts/part-000002.h5")
    before = dataset_digests(file)
    flip_byte_of_row(file, "conv", 0 if not is_packed else 9)

    def killed_at_pack(path: str) -> None:
        if Path(path).name.startswith(".tmp-features.h5"):
            raise KeyboardInterrupt

    on_open.append(killed_at_pack)
    if is_packed:
        with pytest.raises(KeyboardInterrupt):
            look(verify={"repair": True})
        assert not file.exists()
    else:
        assert look(verify={"repair": True})[0] == 0
    on_open.clear()
    for _ in range(2):
        code, found = look(verify={"repair": True})
        assert (code, found["damages"], found["missing"]) == (0, [], [])
        assert dataset_digests(file) == before
