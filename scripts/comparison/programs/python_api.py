"""python -m python_api: what featx gives from Python, as values.npz and store folders."""

from __future__ import annotations

import numpy as np
import torch
from small_models import SmallConvNet

import featx
from featx.gradients import watch
from featx.torch import FeatureDataset, TokenDataset

OPTIONS = {"precision": "fp32", "compile": False, "batch_size": 4, "part_rows": 4}
TRANSFORM = {"resize": 32, "crop": 32}
MODEL = {"library": "custom", "factory": "small_models:SmallConvNet", "weights": None}


class Images:
    """A data set in memory, of which one image cannot be loaded."""

    def __init__(self) -> None:
        self.targets = [i % 3 for i in range(13)]
        self.classes = ["red", "green", "blue"]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index == 5:
            raise ValueError("image 5 is not there")
        rng = np.random.default_rng(index)
        return rng.integers(0, 256, (40, 36, 3), dtype=np.uint8), self.targets[index]


def main() -> None:
    """Write values.npz, and two stores."""
    values: dict[str, object] = {}
    model = {**MODEL, "transform": TRANSFORM}
    store = featx.extract(
        data=Images(), model=model, layers=["conv", "pool"], out="memory", max_failures=1, **OPTIONS
    )
    values["conv"], values["status"] = store["conv"][:], store.status
    values["some"] = store["conv"][[7, 2, 2], :, 1]
    values["x"], values["y"] = store.xy("pool")
    values["failures"] = [[f["key"], f["status"], f["message"]] for f in store.failures]
    values["keys"], values["classes"] = list(map(str, store.keys)), list(store.classes)
    images = [Images()[i][0] for i in range(4)]
    found = featx.embed(images, store, model_factory=MODEL["factory"])
    values["embedded"] = found["conv"]

    dataset = FeatureDataset("memory", "pool")
    values["items"] = torch.stack([dataset[i][0] for i in range(len(dataset))]).numpy()
    tokens = TokenDataset("memory", "conv", tokens="patches", batch_size=32)
    for name in ("features", "row", "position"):
        values[f"tokens-{name}"] = torch.cat([batch[name] for batch in tokens]).numpy()

    torch.manual_seed(0)
    net, x = SmallConvNet(), torch.randn(2, 3, 32, 32)
    with featx.capture(net, ["conv", "pool", "deep:input", "relu"]) as captured:
        net(x)
        values |= {f"captured-{name}": captured[name].detach().numpy() for name in captured}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with watch(net, clip_norm=0.5) as log:
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    values["norms"] = [float(step.norm) for step in log.steps]
    values["trained"] = net.conv.weight.detach().numpy()
    np.savez("values.npz", **{name: np.asarray(value) for name, value in values.items()})


if __name__ == "__main__":
    main()
