"""python -m make_model KIND: writes a small model with fixed random weights as its library does.

transformers, open_clip: a folder of the name; hub: a folder with hubconf.py; export: net.pt2;
weights: net.safetensors and net.pth for small_models.SmallConvNet. Also huggingface TABLE, a folder
with the images of a Parquet file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from small_models import SmallConvNet

HUBCONF = """dependencies = ["torch"]
def small(width=6):
    from torch import nn
    return nn.Sequential(nn.Conv2d(3, width, 8, stride=8), nn.ReLU(), nn.Flatten())
"""


def transformers() -> None:
    """A ViT of two blocks."""
    import transformers as tf

    sizes = {"hidden_size": 32, "intermediate_size": 48, "image_size": 32, "patch_size": 8}
    config = tf.ViTConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    tf.ViTModel(config).save_pretrained("transformers")
    size = {"height": 32, "width": 32}
    tf.ViTImageProcessor(size=size).save_pretrained("transformers")


def open_clip() -> None:
    """A CLIP model, as push_to_hf_hub writes it."""
    import open_clip as library

    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8}
    text = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    model = {"embed_dim": 12, "vision_cfg": vision, "text_cfg": text}
    preprocess = {"size": 32, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
    folder = Path("open_clip")
    folder.mkdir()
    about = {"model_cfg": model, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(about))
    made = library.create_model(f"local-dir:{folder}", load_weights=False)
    tensors = {name: x.clone() for name, x in made.state_dict().items()}
    save_file(tensors, folder / "open_clip_model.safetensors")


def hub() -> None:
    """A clone for torch.hub, whose model has no weights."""
    Path("hub").mkdir()
    Path("hub/hubconf.py").write_text(HUBCONF)


def export() -> None:
    """A program with any batch size."""
    images = torch.zeros(2, 3, 32, 32)
    sizes = ({0: torch.export.Dim.AUTO},)
    net = SmallConvNet().eval()
    program = torch.export.export(net, (images,), dynamic_shapes=sizes)
    torch.export.save(program, "net.pt2")


def weights() -> None:
    """Files of weights, and one of a training that nests them."""
    tensors = SmallConvNet().state_dict()
    save_file(tensors, "net.safetensors")
    torch.save({"model": {f"module.{k}": v for k, v in tensors.items()}, "step": 3}, "net.pth")


def huggingface() -> None:
    """The columns image and label, as save_to_disk writes them."""
    import datasets
    from pyarrow import parquet

    table = parquet.read_table(sys.argv[2]).to_pydict()
    names = sorted(set(table["label"]))
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    rows = {"image": [{"bytes": x, "path": None} for x in table["image"]], "label": table["label"]}
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    saved.save_to_disk("huggingface")
    for path in Path("huggingface").iterdir():  # their times are part of the store
        os.utime(path, (1e9, 1e9))


MAKERS = (transformers, open_clip, hub, export, weights, huggingface)

if __name__ == "__main__":
    torch.manual_seed(0)
    {maker.__name__: maker for maker in MAKERS}[sys.argv[1]]()
