"""Folders of small models of transformers with random weights, as transformers saves them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

tf = pytest.importorskip("transformers", reason="the extra transformers is not installed")

VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
DINO: dict[str, Any] = {k: v for k, v in VIT.items() if k != "intermediate_size"} | {"mlp_ratio": 2}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDTHS: dict[str, Any] = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 2, 1]}
PYRAMID: dict[str, Any] = {"image_size": 64, "patch_size": 4, "embed_dim": 12}


@dataclass(frozen=True)
class Small:
    """A small model of one model_type.

    Attributes:
        config: makes its configuration.
        processor: class of its image processor, as released models of the family have it.
        side: of its images in pixels.
        head: class that builds it.
    """

    config: Callable[[], Any]
    processor: str = "ViTImageProcessor"
    side: int = 32
    head: str = "AutoModel"

    def make_processor(self) -> Any:
        """Return the processor for images of this size, with the family's own way of resizing."""
        made = getattr(tf, self.processor)
        square = {"height": self.side, "width": self.side}
        if not made.size.get("shortest_edge"):
            resize = (
                round(self.side / 0.875) if getattr(made, "do_center_crop", None) else self.side
            )
            return made(size={"height": resize, "width": resize}, crop_size=square)
        short = self.side
        if self.processor in ("BitImageProcessor", "MobileNetV2ImageProcessor"):
            short = round(self.side / 0.875)
        return made(size={"shortest_edge": short}, crop_size=square)


def _convnet(**options: Any) -> dict[str, Any]:
    return {"embedding_size": 8, **WIDTHS, **options}


def _two_towers(name: str, **options: Any) -> Any:
    vision = getattr(tf, f"{name}VisionConfig")(**VIT, **options).to_dict()
    text = getattr(tf, f"{name}TextConfig")(**TEXT, **options).to_dict()
    return getattr(tf, f"{name}Config")(vision_config=vision, text_config=text, **options)


SMALL = {
    "aimv2_vision_model": Small(lambda: tf.Aimv2VisionConfig(**VIT), "CLIPImageProcessor"),
    "beit": Small(
        lambda: tf.BeitConfig(**VIT, vocab_size=20, use_relative_position_bias=True),
        "BeitImageProcessor",
    ),
    "blip_vision_model": Small(
        lambda: tf.BlipVisionConfig(**VIT), "BlipImageProcessor", head="BlipVisionModel"
    ),
    "chinese_clip": Small(
        lambda: _two_towers("ChineseCLIP", projection_dim=16), "ChineseCLIPImageProcessor"
    ),
    "chinese_clip_vision_model": Small(
        lambda: tf.ChineseCLIPVisionConfig(**VIT), "ChineseCLIPImageProcessor"
    ),
    "clip": Small(lambda: _two_towers("CLIP", projection_dim=16), "CLIPImageProcessor"),
    "clip_vision_model": Small(lambda: tf.CLIPVisionConfig(**VIT), "CLIPImageProcessor"),
    "convnext": Small(lambda: tf.ConvNextConfig(**WIDTHS), "ConvNextImageProcessor", 64),
    "convnextv2": Small(lambda: tf.ConvNextV2Config(**WIDTHS), "ConvNextImageProcessor", 64),
    "data2vec-vision": Small(
        lambda: tf.Data2VecVisionConfig(**VIT),
        "BeitImageProcessor",
        head="Data2VecVisionForImageClassification",
    ),
    "deit": Small(lambda: tf.DeiTConfig(**VIT), "DeiTImageProcessor"),
    "dinov2": Small(lambda: tf.Dinov2Config(**DINO), "BitImageProcessor"),
    "dinov2_with_registers": Small(
        lambda: tf.Dinov2WithRegistersConfig(**DINO, num_register_tokens=4), "BitImageProcessor"
    ),
    "dinov3_convnext": Small(
        lambda: tf.DINOv3ConvNextConfig(**WIDTHS), "DINOv3ViTImageProcessor", 64
    ),
    "dinov3_vit": Small(
        lambda: tf.DINOv3ViTConfig(**VIT, num_register_tokens=4), "DINOv3ViTImageProcessor"
    ),
    "dpt": Small(lambda: tf.DPTConfig(**VIT, is_hybrid=False), "DPTImageProcessor"),
    "focalnet": Small(
        lambda: tf.FocalNetConfig(**PYRAMID, depths=[1, 1, 2, 1], focal_levels=[1, 1, 1, 1]),
        "BitImageProcessor",
        64,
    ),
    "hiera": Small(
        lambda: tf.HieraConfig(
            image_size=[64, 64], embed_dim=12, depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 8]
        ),
        "BitImageProcessor",
        64,
    ),
    "ijepa": Small(lambda: tf.IJepaConfig(**VIT), "ViTImageProcessor"),
    "levit": Small(
        lambda: tf.LevitConfig(
            image_size=64,
            hidden_sizes=[16, 24, 32],
            num_attention_heads=[2, 3, 4],
            depths=[1, 2, 1],
            key_dim=[4, 4, 4],
        ),
        "LevitImageProcessor",
        64,
    ),
    "mlcd_vision_model": Small(lambda: tf.MLCDVisionConfig(**VIT), "CLIPImageProcessor"),
    "mobilenet_v1": Small(
        lambda: tf.MobileNetV1Config(depth_multiplier=0.25, image_size=64),
        "MobileNetV2ImageProcessor",
        64,
    ),
    "mobilenet_v2": Small(
        lambda: tf.MobileNetV2Config(depth_multiplier=0.25, image_size=64),
        "MobileNetV2ImageProcessor",
        64,
    ),
    "mobilevit": Small(
        lambda: tf.MobileViTConfig(
            image_size=64,
            hidden_sizes=[16, 20, 24],
            neck_hidden_sizes=[8, 8, 12, 16, 20, 24, 32],
        ),
        "MobileViTImageProcessor",
        64,
    ),
    "mobilevitv2": Small(
        lambda: tf.MobileViTV2Config(
            image_size=64, width_multiplier=0.25, base_attn_unit_dims=[32, 48, 64]
        ),
        "MobileViTImageProcessor",
        64,
    ),
    "pixio": Small(lambda: tf.PixioConfig(**DINO), "ViTImageProcessor"),
    "poolformer": Small(lambda: tf.PoolFormerConfig(**WIDTHS), "PoolFormerImageProcessor", 64),
    "pvt": Small(
        lambda: tf.PvtConfig(**WIDTHS, image_size=64, num_attention_heads=[1, 2, 2, 4]),
        "PvtImageProcessor",
        64,
    ),
    "pvt_v2": Small(
        lambda: tf.PvtV2Config(**WIDTHS, image_size=64, num_attention_heads=[1, 2, 2, 4]),
        "PvtImageProcessor",
        64,
    ),
    "regnet": Small(
        lambda: tf.RegNetConfig(**_convnet(groups_width=4)), "ConvNextImageProcessor", 64
    ),
    "resnet": Small(lambda: tf.ResNetConfig(**_convnet()), "ConvNextImageProcessor", 64),
    "segformer": Small(
        lambda: tf.SegformerConfig(**WIDTHS, num_attention_heads=[1, 2, 2, 4]),
        "SegformerImageProcessor",
        64,
    ),
    "siglip": Small(lambda: _two_towers("Siglip"), "SiglipImageProcessor"),
    "siglip_vision_model": Small(lambda: tf.SiglipVisionConfig(**VIT), "SiglipImageProcessor"),
    "swiftformer": Small(
        lambda: tf.SwiftFormerConfig(depths=[1, 1, 2, 1], embed_dims=[8, 12, 16, 20]),
        "ViTImageProcessor",
        224,
    ),
    "swin": Small(
        lambda: tf.SwinConfig(
            **PYRAMID, depths=[1, 2, 2, 1], num_heads=[1, 2, 3, 4], window_size=2
        ),
        "ViTImageProcessor",
        64,
    ),
    "swinv2": Small(
        lambda: tf.Swinv2Config(
            **PYRAMID, depths=[1, 2, 2, 1], num_heads=[1, 2, 3, 4], window_size=2
        ),
        "ViTImageProcessor",
        64,
    ),
    "vit": Small(lambda: tf.ViTConfig(**VIT)),
    "vit_mae": Small(
        lambda: tf.ViTMAEConfig(
            **VIT,
            decoder_hidden_size=16,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=16,
        )
    ),
    "vit_msn": Small(lambda: tf.ViTMSNConfig(**VIT)),
    "vitdet": Small(lambda: tf.VitDetConfig(**DINO, pretrain_image_size=32)),
}
"""model_type -> its small model."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from writing progress bars and reports to the log."""
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    try:
        yield
    finally:
        tf.logging.enable_progress_bar()
        tf.logging.set_verbosity_warning()


def small_model(model_type: str, head: str | None = None) -> Any:
    """Return a small model whose parameters and statistics are all random.

    Initialisations hide errors: constants make a layer in front of a norm look like the one behind
    it, and some of them are so small that the image is lost among the biases.

    Args:
        model_type: key of `SMALL`.
        head: class of transformers that builds it, None for that of the family.
    """
    head = head or SMALL[model_type].head
    config = SMALL[model_type].config()
    make = getattr(tf, head)
    model = make.from_config(config) if head.startswith("Auto") else make(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.dim() > 1:
                x.normal_(0, x[0].numel() ** -0.5, generator=generator)
            elif name.endswith("bias"):
                x.normal_(0, 0.2, generator=generator)
            else:  # weights of norms, layer scales
                x.uniform_(0.5, 1.5, generator=generator)
        for name, x in model.named_buffers():
            if name.endswith("running_mean"):
                x.normal_(0, 0.2, generator=generator)
            elif name.endswith("running_var"):
                x.uniform_(0.5, 1.5, generator=generator)
    return model.eval()


def write_folder(folder: Path, model_type: str, head: str | None = None) -> Path:
    """Save a small model and its image processor, and return the folder."""
    with quiet():
        small_model(model_type, head).save_pretrained(folder)
        SMALL[model_type].make_processor().save_pretrained(folder)
    return folder


WORDS = ("[PAD]", "[BOS]", "[EOS]", "[UNK]", "a", "cat", "dog", "on", "the", "roof", "tree", "frog")
"""Tokens of `write_tokenizer`; their places are their ids."""


def write_tokenizer(folder: Path, **special: str) -> None:
    """Save a tokenizer of words with the ids of the small text towers, as released models do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 1), ("[EOS]", 2)]
    )
    tf.PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="[UNK]",
        model_input_names=["input_ids", "attention_mask"],
        **{"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", **special},
    ).save_pretrained(folder)
