"""Your own network and training loop, and a memory of features beside it: `engram.features` as a library.

Ten digits arrive two at a time, and earlier images are gone. The network and its loop are plain PyTorch and know
nothing of engram. Five lines after each task keep a memory of features, adapt it when the network has changed, and
fit a classifier on it.

python examples/own_loop.py
"""

from __future__ import annotations

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from engram.features import FeatureMemory, Int8, LinearSVM, Pairs, RidgeAdapter, select

DIMENSION = 64


def train(network: nn.Module, head: nn.Module, images: Tensor, labels: Tensor) -> None:
    """A training loop, as anyone writes it."""
    optimiser = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(30):
        for batch in torch.randperm(len(images)).split(32):
            loss = F.cross_entropy(head(network(images[batch])), labels[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()


def main() -> dict[str, float]:
    """Learn five tasks; return the accuracy over all ten digits, with the memory and without."""
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    tests = torch.arange(len(images)) % 4 == 0

    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, DIMENSION))
    head = nn.Linear(DIMENSION, 10)
    memory = FeatureMemory.empty(DIMENSION)
    for task in range(5):
        new = (labels // 2 == task) & ~tests
        before = copy.deepcopy(network)
        train(network, head, images[new], labels[new])
        with torch.no_grad():
            old_features, features = before(images[new]), network(images[new])  # (n, d) each, of the same images
        # These five lines are all that is added to the loop.
        if len(memory):
            memory = memory.adapted(RidgeAdapter().fit(Pairs(old_features, features, labels[new])))
        sources, counts = select(memory, features, labels[new], per_class=50)
        memory = memory.rearranged(F.normalize(features), sources, counts, Int8())
        classifier = LinearSVM().fit(memory.rows, memory.class_indices)
        print(f"task {task + 1}: {len(memory)} features in {memory.nbytes:,} bytes")

    with torch.no_grad():
        features = network(images[tests])
        answers = {"head": head(features), "memory": classifier.scores(F.normalize(features))}
    accuracies = {name: (scores.argmax(1) == labels[tests]).float().mean().item() for name, scores in answers.items()}
    print("accuracy over ten digits: the loop's own head {head:.3f}, with the memory {memory:.3f}".format(**accuracies))
    return accuracies


if __name__ == "__main__":
    main()
