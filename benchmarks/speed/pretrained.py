"""Pretrained networks: their forward pass against the plain one, and `predict` on many photos against its parts."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from side_by_side import Outcome, in_turns, milliseconds, ratio, show

from engram.data import Samples
from engram.data.labelled import decode_files, images_below
from engram.model import ModelFolder, learn, load, predict
from engram.network import Network, extract, make_network

PHOTOS, CLASSES, PER_CLASS, BATCH = 1_000, 10, 5, 32


def main() -> None:
    if not (root := os.environ.get("ENGRAM_DATA")) or not (objects := Path(root, "objects")).is_dir():
        sys.exit("left out: the photos of benchmarks/photos.py are not in ENGRAM_DATA")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        networks = ("efficientnet-lite0", small_vit(Path(temporary, "vit")))
        show(
            *(forward(name, shown) for name, shown in zip(networks, ("EfficientNet-Lite0", "ViT-S/16"), strict=True)),
            photos(Path(temporary), objects),
        )


def small_vit(folder: Path) -> str:
    """A ViT-S/16 with random weights, in the layout of the Hugging Face hub."""
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    config = ViTConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536)
    ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    ViTImageProcessor().save_pretrained(folder)
    return str(folder)


def forward(name: str, shown: str) -> Outcome:
    """Features of a batch by the network as it predicts, and by the same modules as they are trained."""
    images = torch.randint(0, 256, (BATCH, 224, 224, 3), dtype=torch.uint8)
    samples = Samples.of(images, torch.zeros(BATCH, dtype=torch.int64))
    network = make_network(name, "linear", samples, seed=0).eval()
    frozen = network.frozen()

    def plain(network: Network = network) -> None:
        with torch.no_grad():
            network.features(images)

    ours, eager = in_turns(lambda: extract(frozen, samples), plain, rounds=5)
    return Outcome(
        f"features of photos, {shown}",
        "the plain eager forward pass",
        ratio(eager, ours),
        2,
        detail=f"{milliseconds([t / BATCH for t in ours])} a photo; "
        f"{'bfloat16' if frozen.is_bfloat16 else 'float32'} against float32.",
    )


def photos(temporary: Path, objects: Path) -> Outcome:
    """`predict` on photos, against decoding alone and the forward pass alone."""
    found, _ = images_below(objects / "test")
    classes = sorted({path.parent.name for path in found})[:CLASSES]
    for name in classes:
        (temporary / "taught" / name).mkdir(parents=True)
        for path in [path for path in found if path.parent.name == name][:PER_CLASS]:
            (temporary / "taught" / name / path.name).symlink_to(path)
    folder = ModelFolder(temporary / "model")
    learn(folder, temporary / "taught")
    model = load(folder)
    paths = (found * (PHOTOS // len(found) + 1))[:PHOTOS]
    decoded = torch.stack([image for image in decode_files(paths[:64], 224) if isinstance(image, torch.Tensor)])

    def decode() -> None:
        for _ in decode_files(paths, 224, ahead=64):
            pass

    def classify() -> None:
        for _ in range(0, PHOTOS, len(decoded)):
            model.probabilities(decoded)

    predicted, decoding, forward = in_turns(lambda: list(predict(model, paths)), decode, classify, rounds=3)
    if torch.get_num_threads() == 1:  # nothing can overlap in processor time
        bound, against = (
            [a + b for a, b in zip(decoding, forward, strict=True)],
            "decoding and the forward pass, summed",
        )
    else:
        bound = [max(pair) for pair in zip(decoding, forward, strict=True)]
        against = "the slower of decoding and the forward pass, each alone"
    return Outcome(
        f"predict, {PHOTOS:,} photos",
        against,
        ratio(bound, predicted),
        0.9,
        unit="%",
        detail=f"A photo: {milliseconds([t / PHOTOS for t in predicted])}; decoding "
        f"{milliseconds([t / PHOTOS for t in decoding])}, forward {milliseconds([t / PHOTOS for t in forward])}.",
    )


if __name__ == "__main__":
    main()
