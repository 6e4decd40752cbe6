"""Weights from files: tensors only, every key in its place, and seeded where there are none."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from saved_weights import RunsCode, State
from torch import nn

from featx.config import model_options
from featx.errors import WeightsError
from featx.models import load_weights, read_weights, seeded, state_sha256


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))


@pytest.fixture
def state() -> State:
    with seeded(7):
        return net().state_dict()


def loaded(path: Path) -> State:
    module = net()
    load_weights(module, read_weights(path), path.name)
    return module.state_dict()


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".th", ".bin", ".ckpt", ".pth.tar"])
def test_checkpoints_of_any_name(tmp_path: Path, state: State, suffix: str) -> None:
    """Those of other training code are in test_training_checkpoints.py."""
    path = tmp_path / f"weights{suffix}"
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}, "best": 91.8}, path)
    assert same(loaded(path), state)
    assert model_options(name="any", library="timm", weights=path.name).weights_file == path.name


def test_safetensors(tmp_path: Path, state: State) -> None:
    save_file(state, tmp_path / "weights.safetensors")
    assert same(read_weights(tmp_path / "weights.safetensors"), state)


@pytest.mark.parametrize("legacy", [True, False])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, legacy: bool) -> None:
    path, witness = tmp_path / "weights.pth", tmp_path / "ran"
    torch.save({"w": RunsCode(witness)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(
        WeightsError, match=r"cannot be read: .*Expected a file of tensors only"
    ) as raised:
        read_weights(path)
    assert "weights_only" not in str(raised.value), "the advice of torch runs code of the file"
    assert not witness.exists()
    path.write_bytes(pickle.dumps(RunsCode(witness)))
    with pytest.raises(WeightsError, match="cannot be read"):
        read_weights(path)
    assert not witness.exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("damage", ["empty", "short", "text"])
def test_damaged_files_are_refused(tmp_path: Path, state: State, suffix: str, damage: str) -> None:
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save(state, path)
    else:
        save_file(state, path)
    whole = path.read_bytes()
    path.write_bytes(
        {"empty": b"", "short": whole[: len(whole) // 2], "text": b"404 not found"}[damage]
    )
    with pytest.raises(WeightsError, match="cannot be read: "):
        read_weights(path)


def test_torchscript_is_refused_with_how_to_save_its_tensors(tmp_path: Path, state: State) -> None:
    path = tmp_path / "net.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        torch.jit.trace(nn.Linear(2, 3), torch.zeros(1, 2)).save(path)
    with pytest.raises(WeightsError, match=r"net\.pt is a TorchScript program.*torch\.jit\.load"):
        read_weights(path)


def test_a_file_that_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save([torch.zeros(3)], tmp_path / "w.pth")
    with pytest.raises(WeightsError, match="holds a list, no state dict"):
        read_weights(tmp_path / "w.pth")


def test_a_missing_file_names_the_folder_it_was_looked_for_in(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no such file \(looked in /.*safetensors or .pth"):
        read_weights(Path("nowhere.pth"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s.pop("0.weight"), r"1 key missing \(0.weight\)"),
        (lambda s: s.update({"2.bias": torch.zeros(1)}), r"1 unexpected \(2.bias\)"),
        (
            lambda s: s.update({"0.bias": torch.zeros(5)}),
            r"1 of another shape \(0.bias \(5,\) instead of \(2,\)\)",
        ),
        (lambda s: s.clear(), "6 keys missing"),
    ],
)
def test_weights_of_another_model_are_refused_and_nothing_is_loaded(
    state: State, change: Callable[[State], object], expected: str
) -> None:
    module = net()
    before = state_sha256(module)
    change(state)
    with pytest.raises(WeightsError, match=expected):
        load_weights(module, state, "file.pth")
    assert state_sha256(module) == before


def test_tied_weights_have_one_value() -> None:
    tied, free = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    tied[1].weight = tied[0].weight
    before = state_sha256(tied)
    with pytest.raises(WeightsError, match=r"0\.weight and 1\.weight are one tensor"):
        load_weights(tied, free.state_dict(), "untied.pth")
    assert state_sha256(tied) == before
    free[1].weight = free[0].weight
    load_weights(tied, free.state_dict(), "tied.pth")
    assert state_sha256(tied) == state_sha256(free)


def test_old_files_may_lack_the_batch_counter(state: State) -> None:
    module = net()
    del state["1.num_batches_tracked"]
    load_weights(module, state, "old.pth")
    assert torch.equal(module[0].weight, state["0.weight"])


def test_seeded_is_repeatable_and_leaves_the_callers_random_state() -> None:
    before = torch.random.get_rng_state()
    hashes = set()
    for seed in (0, 0, 1):
        with seeded(seed):
            hashes.add(state_sha256(net()))
    assert len(hashes) == 2
    assert torch.equal(torch.random.get_rng_state(), before)
    with pytest.raises(ZeroDivisionError), seeded(3):
        raise ZeroDivisionError
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_hash_sees_names_shapes_types_and_single_bits() -> None:
    def hash_of(**tensors: torch.Tensor) -> str:
        module = nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return state_sha256(module)

    zeros = torch.zeros(4)
    flipped = zeros.clone()
    flipped[3] = -0.0
    hashes = {
        hash_of(a=zeros),
        hash_of(b=zeros),
        hash_of(a=zeros.view(2, 2)),
        hash_of(a=zeros.int()),
        hash_of(a=flipped),
        hash_of(a=torch.tensor(0.0)),
    }
    assert len(hashes) == 6
    strided = torch.zeros(4, 2)[:, 0]
    assert hash_of(a=strided) == hash_of(a=zeros)


def test_a_prefix_that_no_name_has_is_refused(state: State) -> None:
    with pytest.raises(WeightsError, match=r"no tensor .* begins so\. Its names begin with 0, 1\."):
        load_weights(net(), state, "w.pth", "teacher.")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused_and_nothing_is_loaded(
    state: State, dtype: torch.dtype
) -> None:
    """`load_state_dict` would take the integers themselves for the weights."""
    module = net()
    before = state_sha256(module)
    state["0.weight"] = (state["0.weight"] * 100).to(dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(WeightsError, match=f"1 tensor .*0.weight is {name} instead of float32"):
        load_weights(module, state, "int8.pth")
    assert state_sha256(module) == before


def test_a_counter_of_another_integer_type_is_converted(state: State) -> None:
    module = net()
    state["1.num_batches_tracked"] = torch.tensor(5, dtype=torch.int32)
    load_weights(module, state, "old.pth")
    assert module[1].num_batches_tracked.item() == 5


@pytest.mark.parametrize(
    ("name", "value"), [("1.bias", "nan"), ("1.running_var", "nan"), ("1.running_var", "inf")]
)
def test_weights_that_are_not_finite_are_refused(state: State, name: str, value: str) -> None:
    state[name][0] = float(value)
    with pytest.raises(WeightsError, match=rf"damaged: NaN or infinity in 1 tensor \({name}\)"):
        load_weights(net(), state, "w.pth")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2])
def test_a_mask_may_be_infinite(dtype: torch.dtype) -> None:
    module, masked = (nn.Linear(2, 2) for _ in range(2))
    module.register_buffer("mask", torch.zeros(2, 2, dtype=dtype))
    masked.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1).to(dtype))
    load_weights(module, masked.state_dict(), "w.pth")
    assert torch.equal(module.mask.float(), masked.mask.float())


def test_a_whole_pickled_module_is_refused(tmp_path: Path) -> None:
    torch.save(net(), tmp_path / "model.pth")
    with pytest.raises(WeightsError, match="tensors only"):
        read_weights(tmp_path / "model.pth")
