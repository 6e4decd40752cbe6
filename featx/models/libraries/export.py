"""model=export model.name=FILE.pt2: programs of torch.export."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from featx.config import USUAL_CROP, USUAL_RESIZE, TransformConfig, UnpreparedModelConfig, options
from featx.errors import ConfigError
from featx.models.libraries.registry import LIBRARIES, ModelLibrary

if TYPE_CHECKING:
    from featx.models.base import Backbone
    from featx.models.exported_program import Program


@options("model")
class ExportedProgramOptions(UnpreparedModelConfig):
    """Options of model=export."""

    name: str = ""
    library: str = "export"

    needs = "model.name=FILE.pt2, a program of torch.export.save"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights != "default" or self.init != "loaded":
            raise ConfigError(
                "model.weights and model.init have no effect with model=export: the weights are "
                "part of the program."
            )

    @property
    def code(self) -> str:
        """Options of the command that name the program."""
        return f"model=export model.name={self.name}"

    def code_sha256(self) -> str | None:
        """SHA-256 of the file of the program; None if it cannot be read."""
        try:
            with Path(self.name).expanduser().open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return None


class Export(ModelLibrary[ExportedProgramOptions]):
    """Programs of torch.export."""

    def build(self, config: ExportedProgramOptions, seed: int) -> Backbone:
        """Open a program, and compare the module built from it with the program itself."""
        from featx.models.base import Backbone, LibraryEmbedding
        from featx.models.exported_program import check_forward, open_program
        from featx.models.preprocessing import stated_preprocess

        program = open_program(Path(config.name))
        preprocess = stated_preprocess(_transform(config, program))
        check_forward(program, preprocess.crop, config.name)
        embedding = None
        if program.gives_vectors:
            # The output is always found among the tensors of a pass, so nothing has to be exposed.
            embedding = LibraryEmbedding(program.module, lambda: None)
        backbone = Backbone(
            module=program.module,
            name=f"export/{Path(config.name).name}",
            weights="those of the program",
            preprocess=preprocess,
            embedding=embedding,
            provenance={"program_sha256": program.sha256},
        )
        if program.batch_size is not None:
            backbone.choices["batch"] = (
                f"{program.batch_size} images in a call, as exported: only the output can be "
                "captured"
            )
        return backbone


def _transform(config: ExportedProgramOptions, program: Program) -> TransformConfig:
    """Return the preprocessing, with the crop that a program takes."""
    transform = config.transform
    if program.size is None:
        return transform
    height, width = program.size
    crop = transform.crop
    if crop is not None and program.size != (
        (crop, crop) if isinstance(crop, int) else tuple(crop)
    ):
        raise ConfigError(
            f"model.transform.crop={crop}: {config.name} was exported for images of {height} x "
            f"{width} pixels. Leave the option out, or export the model for this size."
        )
    if transform.resize is None and program.size != (USUAL_CROP, USUAL_CROP):
        raise ConfigError(
            f"{config.name} takes images of {height} x {width} pixels and does not say from which "
            f"size they are cut (images of {USUAL_CROP} pixels are cut from {USUAL_RESIZE}). Give "
            f"model.transform.resize, such as [{height},{width}] for the whole image, or a number "
            "of pixels for its shorter side."
        )
    return replace(transform, crop=[height, width])


LIBRARIES.register(
    Export(
        "export",
        "Programs of torch.export: a file of torch.export.save.",
        ExportedProgramOptions,
        takes_any_name=True,
    )
)
