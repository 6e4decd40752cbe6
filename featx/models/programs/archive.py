"""Archives of torch.export.save, which are checked before torch opens them.

`torch.export.load` runs what a file says: it unpickles objects, evaluates the expressions of
symbolic sizes as Python (sympy.sympify), calls any function below `torch` that a node names, such
as torch.os.system, and writes names into Python code. A program of an image model needs none of
this. So the archive is read with the standard library, checked, and written again without the parts
that are not needed; torch opens this copy and never the file itself.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from featx.errors import ModelError, one_line

HOW_TO_EXPORT = (
    "batch = torch.export.Dim('batch'); torch.export.save(torch.export.export(model.eval(), "
    "(images,), dynamic_shapes=({0: batch},)), 'model.pt2')"
)
"""Code that makes a file which featx opens, with `images` (2, 3, H, W) float32."""

_OPERATORS = re.compile(
    r"torch\.ops\.(aten|prims|torchvision)\.((?!__)\w+|__i?(and|or|xor|lshift|rshift)__)\.(?!_)\w+"
    r"|torch\.ops\.higher_order\.wrap_with_(set_grad_enabled|autocast)"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|not_"
    r"|xor|lshift|rshift|getitem)"
    r"|torch\.sym_\w+|math\.\w+"
)
"""Targets of nodes that compute; anything else below `torch` may be any Python function."""

_SIZE = re.compile(r"L\['\w+'\]\.(size|stride)\(\)\[\d+\]", re.ASCII)
_CALL = re.compile(r"\b(torch\.sym_[a-z]+|math\.[a-z]+)\(")
"""Parts of a guard, such as `torch.sym_max(1, L['x'].size()[2] // 16) > 3`."""

_OBJECTS = ("as_operator", "as_custom_obj", "custom_obj_values")
"""Fields that hold a function or an object instead of tensors, numbers and texts."""

_READS_FILES = "torch.ops.aten.from_file"
"""Operator that reads a file, and makes it if it does not exist."""

_ASSERTION = "torch.ops.aten._assert_tensor_metadata.default"
"""Node that fails unless dtype and device are those of the export. It computes nothing, and a run
may use another precision or device."""

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PLAIN = re.compile(r"[^\"'\\\x00-\x1f\x7f]*")
"""Text that ends no string literal in the code that torch writes."""

_FUNCTIONS = re.compile(
    "Abs|Add|And|BooleanFalse|BooleanTrue|CeilDiv|CeilToInt|CleanDiv|Eq|Equality|Float|FloatPow|"
    "FloatTrueDiv|FloorDiv|FloorToInt|GreaterThan|Identity|IntTrueDiv|Integer|LShift|LessThan|Max|"
    "Min|Mod|ModularIndexing|Mul|Ne|Not|Or|Piecewise|Pow|PowByNatural|PythonMod|RShift|Rational|"
    "RoundDecimal|RoundToInt|StrictGreaterThan|StrictLessThan|Symbol|ToFloat|TruncToFloat|"
    "TruncToInt|Unequality|Where"
)
"""Names that may be called in the expression of a size."""

_PARTS = (
    ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp,
    ast.Compare, ast.BoolOp, ast.operator, ast.unaryop, ast.cmpop, ast.boolop,
)  # fmt: skip
"""Parts of an expression that is arithmetic."""


class _RefusedError(Exception):
    """Reason why an archive is not opened."""


def checked_archive(path: Path) -> tuple[io.BytesIO, str]:
    """Read a file of torch.export.save and check that it holds tensors and operators only.

    Args:
        path: path of the file; ~ is expanded.

    Returns:
        The archive that torch may open, without example inputs and traces of the source code, and
        the SHA-256 of the file in hex digits.

    Raises:
        ModelError: the file does not exist, is damaged or of another kind, holds pickled objects,
            or names code that is no operator.
    """
    path = path.expanduser()
    if not path.is_file():
        raise ModelError(
            f"model.name={path}: no such file (looked in {Path.cwd()}). Expected a file of "
            f"torch.export.save: {HOW_TO_EXPORT}"
        )
    try:
        data = path.read_bytes()
        return _copy_checked(data), hashlib.sha256(data).hexdigest()
    except _RefusedError as error:
        raise ModelError(f"model.name={path} {error}") from error
    except OSError as error:
        raise ModelError(f"model.name={path} cannot be read: {error}.") from error
    except (
        zipfile.BadZipFile,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
    ) as error:
        reason = one_line(error)
        raise ModelError(
            f"model.name={path} is damaged, cut off, or no file of torch.export.save ({reason}). "
            "Copy it again, or export the model again."
        ) from error


def _copy_checked(data: bytes) -> io.BytesIO:
    """Return the archive in `data` after its checks, without what torch does not need."""
    if not data.startswith(b"PK"):
        raise _RefusedError(
            "is no archive of torch.export.save (it may be an ONNX model, weights or a pickle). "
            f"Export the model: {HOW_TO_EXPORT}"
        )
    copy = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        root = _root_of([member.filename for member in members])
        with zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as output:
            for member in members:
                if member.compress_type != zipfile.ZIP_STORED:
                    raise _RefusedError("is compressed, which torch.export.save does not do.")
                name = member.filename.removeprefix(root)
                output.writestr(member.filename, _check_member(name, archive.read(member)))
    copy.seek(0)
    return copy


def _root_of(names: list[str]) -> str:
    """Return the folder of an archive in which everything lies, such as 'model/'.

    Raises:
        _RefusedError: the archive is of another kind.
    """
    root = names[0].partition("/")[0] + "/" if names else ""
    inside = {name.removeprefix(root) for name in names}
    if any("data/aotinductor/" in name for name in names):
        raise _RefusedError(
            "was compiled by AOTInductor (torch._inductor.aoti_compile_and_package): it is machine "
            "code without layers, made for one kind of device. Give the file of torch.export.save "
            "that it was compiled from."
        )
    if "serialized_exported_program.json" in (*names, *inside):
        raise _RefusedError(
            "was written by torch 2.7 or older. Load it with that version, export the model again "
            "with the torch of this environment, and give the new file."
        )
    if "data.pkl" in inside:
        kind = "torch.jit.save (TorchScript)" if "constants.pkl" in inside else "torch.save"
        raise _RefusedError(
            f"is a file of {kind}, not of torch.export.save. Weights go into model.weights=FILE "
            f"with the name of their architecture; a model is exported with: {HOW_TO_EXPORT}"
        )
    if "archive_format" not in inside or "models/model.json" not in inside:
        raise _RefusedError(
            f"is an archive, but not of torch.export.save. Export the model: {HOW_TO_EXPORT}"
        )
    if len(inside) != len(names) or any(not name.startswith(root) for name in names):
        raise _RefusedError("has members of the same name, or outside of its folder.")
    return root


def _check_member(name: str, data: bytes) -> bytes:
    """Return a member of the archive as torch may read it.

    Args:
        name: name below the folder of the archive.
        data: its bytes.

    Raises:
        _RefusedError: torch would unpickle it, or run what it says.
    """
    folder = name.rpartition("/")[0]
    if folder == "models":
        if name != "models/model.json":
            raise _RefusedError("holds several programs; save one in each file.")
        return json.dumps(_checked_program(json.loads(data))).encode()
    if folder == "data/sample_inputs":
        return b""  # a pickle, which nothing needs
    if folder in ("data/weights", "data/constants"):
        return _checked_tensors(name, data)
    if folder in ("", ".data") or folder.partition("/")[0] == "extra":
        return data
    raise _RefusedError(f"has a member {name}, which no program of torch.export.save has.")


def _checked_tensors(name: str, data: bytes) -> bytes:
    """Return a member of the folder of weights or constants.

    Raises:
        _RefusedError: it is pickled, an object, or on another device than the CPU.
    """
    stem = name.rpartition("/")[2]
    if not stem.endswith("_config.json"):
        if not re.fullmatch(r"(weight|tensor)_\d+", stem):
            raise _RefusedError(
                f"holds {name}, a pickled object or a file of an older torch; featx unpickles "
                "nothing. Export the model again with this torch, without custom objects."
            )
        return data
    for tensor, about in json.loads(data)["config"].items():
        if about["use_pickle"] or not re.fullmatch(r"(weight|tensor)_\d+", about["path_name"]):
            raise _RefusedError(
                f"holds {tensor} as a pickled object, and featx unpickles nothing. Give the model "
                "plain tensors (no quantised or sparse ones, no subclasses), and export it again."
            )
        _check_text(tensor)
        _check_devices(about)
    return data


def _checked_program(program: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a program after its checks, without what torch does not need.

    Raises:
        _RefusedError: it is not arithmetic on tensors.
    """
    _check_devices(program)
    for key, value in _pairs(program):
        if key == "nodes":
            value[:] = [node for node in value if node["target"] != _ASSERTION]
            for node in value:
                _check_target(node["target"])
                kept = {"nn_module_stack": node["metadata"].get("nn_module_stack")}
                node["metadata"] = {name: text for name, text in kept.items() if text}
        elif key == "guards_code":
            for text in value or ():
                _check_guard(text)
        elif key in _OBJECTS:
            if value:
                raise _RefusedError("passes functions or custom objects. Give plain tensors.")
        elif key in ("in_spec", "out_spec"):
            for name, inner in _pairs(json.loads(value)):
                # The keys of a mapping are JSON inside of JSON.
                is_json = name == "context" and isinstance(inner, str)
                for text in _texts(json.loads(inner) if is_json else inner):
                    _check_text(text)
        elif key == "expr_str":
            _check_expression(value)
        elif key in ("name", "as_name"):
            # Names of arguments stand in the code that torch writes; those of outputs may be ''.
            if isinstance(value, str) and value and not _IDENTIFIER.fullmatch(value):
                raise _RefusedError(f"has a node called {value[:80]!r}, which is no identifier.")
        elif key == "forward_arg_names":
            if not all(_IDENTIFIER.fullmatch(name) for name in value or ()):
                raise _RefusedError(f"has arguments called {str(value)[:80]}, no identifiers.")
        elif key != "as_string":  # torch writes these as Python literals
            for text in (str(key), *_texts(value)):
                _check_text(text)
    return program


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of every mapping inside a JSON value; outer ones first."""
    if isinstance(value, dict):
        for key, inner in list(value.items()):
            yield key, inner
            yield from _pairs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _pairs(inner)


def _texts(value: Any) -> Iterator[str]:
    """Yield a text, or the texts in lists; those in mappings have keys of their own."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, list):
            yield from _texts(each)
        elif isinstance(each, str):
            yield each


def _check_target(target: str) -> None:
    """Check that a node calls an operator.

    Raises:
        _RefusedError: it calls other code.
    """
    if _OPERATORS.fullmatch(target) and not target.startswith(_READS_FILES):
        return
    raise _RefusedError(
        f"calls {target[:80]!r}, which is no operator of torch. featx runs no other code because a "
        "file names it: export a model of plain PyTorch, or load this one in code of your own with "
        "model=custom."
    )


def _check_expression(text: str) -> None:
    """Check that the expression of a size is arithmetic, because torch evaluates it as Python.

    Raises:
        _RefusedError: it is anything else.
    """
    refusal = _RefusedError(f"has a size {text[:80]!r}, which is no arithmetic expression.")
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, MemoryError) as error:
        raise refusal from error
    called = {id(node.func): node.func for node in nodes if isinstance(node, ast.Call)}.values()
    texts = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    if (
        not all(isinstance(node, _PARTS) for node in nodes)
        or not all(isinstance(name, ast.Name) and _FUNCTIONS.fullmatch(name.id) for name in called)
        or not all(re.fullmatch(r"\w+|[\d.e+-]+", each, re.ASCII) for each in texts)
        or any("__" in node.id for node in nodes if isinstance(node, ast.Name))
    ):
        raise refusal


def _check_guard(text: str) -> None:
    """Check that a guard, which torch runs as Python, is a condition on sizes of the input.

    Raises:
        _RefusedError: it is anything else.
    """
    _check_text(_SIZE.sub("size", text))
    _check_expression(_CALL.sub("Max(", _SIZE.sub("size", text)))


def _check_text(text: str) -> None:
    """Check that a name stays within quotes where torch writes it into code.

    Raises:
        _RefusedError: it does not.
    """
    if not _PLAIN.fullmatch(text):
        raise _RefusedError(f"has a name with quotes or control characters: {text[:80]!r}.")


def _check_devices(value: Any) -> None:
    """Check that every tensor is on the CPU.

    Raises:
        _RefusedError: one is not.
    """
    for key, found in _pairs(value):
        if key in ("device", "as_device") and isinstance(found, dict) and found["type"] != "cpu":
            raise _RefusedError(
                f"was exported on {found['type']}, and would run there only. Export it on the CPU: "
                f"model.cpu(), images.cpu(), then {HOW_TO_EXPORT}; featx moves it to the device."
            )
