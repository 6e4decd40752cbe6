"""Packages export what others use, and others import from packages, not from their modules."""

import ast
import functools
import importlib
import inspect
from pathlib import Path

import pytest
from conftest import run_python

import featx

ROOT = Path(featx.__file__).parent
STUBS = sorted(ROOT.rglob("__init__.pyi"))
PUBLIC = "featx/__init__.py"
"""The public names of featx are loaded from where they are defined."""


REPOSITORY = ROOT.parent


def package_of(stub: Path) -> str:
    return ".".join(stub.parent.relative_to(ROOT.parent).parts)


@pytest.mark.parametrize("stub", STUBS, ids=package_of)
def test_every_exported_name_can_be_imported(stub: Path) -> None:
    package = importlib.import_module(package_of(stub))
    assert package.__all__
    modules = {"gradients", "similarity", "torch"} if package is featx else set()
    assert set(dir(package)) == {*package.__all__, *modules}
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        package.no_such_name  # noqa: B018
    # Importing a module of that name would set the attribute, and hide the exported name.
    modules = {path.stem for path in stub.parent.iterdir() if path.stem.isidentifier()}
    names = {name for name in package.__all__ if not inspect.ismodule(getattr(package, name))}
    assert not modules & names


def test_other_packages_import_from_the_package() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT.parent)
        if str(relative) == PUBLIC:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
                continue
            parts = node.module.split(".")
            own = len(relative.parts) > 2 and parts[1:2] == [relative.parts[1]]
            package = ROOT.parent.joinpath(*parts)
            modules = [a.name for a in node.names if (package / f"{a.name}.py").exists()]
            if len(parts) > 1 and modules and not own:
                exported = importlib.import_module(node.module).__all__
                found += [
                    f"{relative}:{node.lineno}: from {node.module} import {name}"
                    for name in modules
                    if name not in exported
                ]
            is_module = ROOT.parent.joinpath(*parts).with_suffix(".py").exists()
            is_private = all(alias.name.startswith("_") for alias in node.names)
            is_loader = node.module == "featx.base.exports"
            if len(parts) > 2 and is_module and not (own or is_private or is_loader):
                found.append(f"{relative}:{node.lineno}: from {node.module}")
    assert not found, "import these from their packages:\n" + "\n".join(found)


@functools.cache
def exported_from(package: str) -> dict[str, str]:
    """Exported name -> the module that defines it, for the names of a package."""
    modules = {}
    stub = REPOSITORY.joinpath(*package.split("."), "__init__.pyi")
    for node in ast.parse(stub.read_text(encoding="utf-8")).body if stub.exists() else []:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            source = f"{package}.{node.module}"
            found = exported_from(source)
            modules |= {alias.name: found.get(alias.name, source) for alias in node.names}
    return modules


def package_that_exports(module: str, name: str) -> str | None:
    """The outermost package around a module that exports this name of it, below featx itself."""
    parts = module.split(".")
    packages = (".".join(parts[:length]) for length in range(2, len(parts)))
    return next((each for each in packages if exported_from(each).get(name) == module), None)


def test_the_module_of_a_name_exported_twice_is_the_one_that_defines_it() -> None:
    module = "featx.models.libraries.registry"
    assert package_that_exports(module, "LIBRARIES") == "featx.models"
    assert package_that_exports(module, "no_such_name") is None
    assert package_that_exports("featx.models", "LIBRARIES") is None


def test_tests_and_scripts_import_what_a_package_exports_from_it() -> None:
    found = []
    scripts = (path for path in (REPOSITORY / "scripts").iterdir() if path.is_file())
    modules = (path for name in ("tests", "scripts") for path in (REPOSITORY / name).rglob("*.py"))
    for path in sorted({*scripts, *modules}):
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".py" and "python" not in text.split("\n", 1)[0]:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("featx."):
                continue
            found += [
                f"{path.relative_to(REPOSITORY)}:{node.lineno}: from {package} import {alias.name}"
                for alias in node.names
                if (package := package_that_exports(node.module, alias.name))
            ]
    assert not found, "import these from their packages:\n" + "\n".join(found)


def test_importing_every_package_loads_no_torch() -> None:
    packages = ", ".join(package_of(stub) for stub in STUBS)
    code = f"import sys, {packages}; assert not {{'torch', 'h5py', 'hydra'}} & set(sys.modules)"
    run_python("-c", code)


def test_modules_of_featx_are_attributes_in_a_fresh_process() -> None:
    run_python(
        "-c",
        "import sys, featx\n"
        "assert {'gradients', 'similarity', 'torch'} <= set(dir(featx))\n"
        "assert featx.torch.__name__ == 'featx.torch'\n"
        "assert 'torch' not in sys.modules\n"
        "assert featx.torch.FeatureDataset.__module__ == 'featx.torch.feature_dataset'\n"
        "assert featx.gradients.watch and featx.similarity.search\n"
        "from featx import *\n"
        "assert 'torch' not in globals() and FeatxError\n",
    )
