"""thingsvision from a folder of images to its HDF5 file; run by an interpreter that has it.

    PYTHON thingsvision_peer.py FOLDER MODEL LAYER STATE_DICT OUT

Prints the seconds from the first image to the closed file as the last line, and leaves the rows
in OUT/features.npy. It is used as its README has it: a data set, its DataLoader, extract_features
with flattened activations, save_features.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from thingsvision import get_extractor
from thingsvision.utils.data import DataLoader, ImageDataset
from thingsvision.utils.storing import save_features


def main(folder: str, model: str, layer: str, state_dict: str, out: str) -> None:
    extractor = get_extractor(model, source="torchvision", device="cpu", pretrained=False)
    extractor.model.load_state_dict(torch.load(state_dict))
    extractor.model.eval()
    transforms = extractor.get_transformations(resize_dim=256, crop_dim=224)
    with torch.no_grad():
        extractor.model(torch.zeros(32, 3, 224, 224))  # warm, as the other contenders are
    started_at = time.perf_counter()
    images = ImageDataset(
        root=folder, out_path=out, backend=extractor.get_backend(), transforms=transforms
    )
    batches = DataLoader(dataset=images, batch_size=32, backend=extractor.get_backend())
    features = extractor.extract_features(
        batches=batches, module_name=layer, flatten_acts=True, output_type="ndarray"
    )
    save_features(features, out_path=out, file_format="hdf5")
    seconds = time.perf_counter() - started_at
    np.save(Path(out) / "features.npy", np.asarray(features, np.float64))
    print(seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
