"""LwF as this field writes it: a `DataLoader` with workers, PIL transforms of each image, an eager teacher.

Nothing in it is slow on purpose: workers live on between epochs, and the loss is that of all classes at once.
"""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

MEAN, STD = torch.tensor([0.507, 0.487, 0.441])[:, None, None], torch.tensor([0.267, 0.256, 0.276])[:, None, None]


class Images(Dataset):
    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = ImageOps.expand(Image.fromarray(self.images[index]), border=4)
        left, top = random.randint(0, 8), random.randint(0, 8)
        image = image.crop((left, top, left + 32, top + 32))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        return (tensor - MEAN) / STD, int(self.labels[index])


class Classifier(nn.Module):
    def __init__(self, extractor: nn.Module, dimension: int, classes: int) -> None:
        super().__init__()
        self.extractor = extractor
        self.fc = nn.Linear(dimension, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.extractor(images))


def loader(images: np.ndarray, labels: np.ndarray, batch_size: int) -> DataLoader:
    return DataLoader(Images(images, labels), batch_size, shuffle=True, num_workers=2, persistent_workers=True)


def train(student: Classifier, teacher: Classifier, batches: DataLoader, epochs: int, learning_rate: float) -> None:
    """Cross-entropy on the new classes, and the teacher's answers for the old ones."""
    optimiser = torch.optim.SGD(student.parameters(), learning_rate, momentum=0.9, weight_decay=1e-5)
    old = teacher.fc.out_features
    student.train()
    for _ in range(epochs):
        total = 0.0
        for images, labels in batches:
            scores = student(images)
            with torch.no_grad():
                answers = torch.sigmoid(teacher(images))
            targets = torch.cat([answers, F.one_hot(labels - old, scores.shape[1] - old).float()], dim=1)
            loss = F.binary_cross_entropy_with_logits(scores, targets)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item()


def grown(teacher: Classifier, classes: int) -> Classifier:
    """A copy with more classes."""
    student = copy.deepcopy(teacher)
    old = student.fc
    student.fc = nn.Linear(old.in_features, old.out_features + classes)
    with torch.no_grad():
        student.fc.weight[: old.out_features] = old.weight
        student.fc.bias[: old.out_features] = old.bias
    return student
