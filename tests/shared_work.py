"""Functions that tests call on several ranks by `processes.together`."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from conftest import blobs
from learners_made import quick
from progress_made import Recorder
from torch import Tensor, nn

from engram.data import Samples, Stream, split
from engram.errors import EngramError, TrainingError
from engram.experiments import run
from engram.features import ProductQuantisation, select
from engram.features.memory import FeatureMemory
from engram.network import Loss, Network, Training, extract, make_network, parallel
from engram.network.parallel import rank


def refusal(act: Any) -> str:
    """The type and message of the error that a call raises."""
    try:
        act()
    except EngramError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


# Collective operations


def exchanged() -> dict[str, Any]:
    """The result of each collective operation."""
    number = rank()
    values = {
        "numbers": [1, 2.5, None, True, "text"],
        "tensors": (torch.arange(3), torch.tensor(0.1, dtype=torch.float64), torch.empty(0, 4), torch.tensor([True])),
        "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    }
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
    with torch.no_grad():
        module[0].weight.fill_(number)
        module[1].running_mean.fill_(number)
    parallel.broadcast_module(module)

    def refuse() -> None:
        raise TrainingError(f"refused by {number}")

    return {
        "size": parallel.world_size(),
        "is main": parallel.is_main(),
        "threads": torch.get_num_threads(),
        "parts": [parallel.part(count) for count in range(8)],
        "shares": [parallel.share(count) for count in range(8)],
        "broadcast": parallel.broadcast(lambda: (number, values)),
        "on main": parallel.on_main(lambda: number),
        "broadcast error": refusal(lambda: parallel.broadcast(refuse)),
        "on main error": refusal(lambda: parallel.on_main(refuse)),
        "gathered": parallel.all_gather(torch.full((number, 2), float(number))),  # 0 rows, 1 row, ...
        "mean": parallel.mean(torch.tensor(float(number))),
        "module": (module[0].weight.detach().clone(), module[1].running_mean.clone()),
        "same": refusal(lambda: parallel.check_same({"the": "same"}, "anything")),
        "different": refusal(lambda: parallel.check_same(min(number, 1), "the number")),
        "main first": parallel.main_first(lambda: (time.sleep(0.1), time.monotonic())[1]),
    }


def waited(seconds: float) -> float:
    """The result of rank 0 after it worked alone for so long."""

    def work() -> float:
        time.sleep(seconds)
        return seconds

    return parallel.broadcast(work)


def selected(vectors: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors that herding selects."""
    return select(FeatureMemory.empty(vectors.shape[1]), vectors, columns, 10)


def encoded(vectors: Tensor) -> dict[str, Tensor]:
    """The tensors of product-quantised vectors."""
    return ProductQuantisation().encode(vectors).tensors()


# Training


def images(count: int = 40, side: int = 8) -> Samples:
    drawn = torch.randint(0, 256, (count, side, side, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return Samples.of(drawn, torch.arange(count) % 4)


def vectors(count: int = 43) -> Samples:
    return Samples.of(torch.randn(count, 6, generator=torch.Generator().manual_seed(2)), torch.arange(count) % 4)


def batches(count: int, epochs: int, **settings: Any) -> list[tuple[Tensor, Tensor]]:
    """This rank's inputs of each batch, and the positions of the global batch."""
    training = Training(pad=2, brightness=63.0, contrast=0.8, **settings)
    return [each for epoch in range(epochs) for each in training.batches(images(count), 5, 1, epoch)]


class Epochs(Recorder):
    """A progress that records a hash of the network at the end of each epoch."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.states: list[str] = []
        self.losses: list[float] = []

    def log(self, **values: float) -> None:
        self.states.append(digest(self.network.state_dict()))
        self.losses.append(values["loss"])


def digest(state: dict[str, Tensor]) -> str:
    """A hash of every bit of a state dict."""
    sha = hashlib.sha256()
    for name in sorted(state):
        sha.update(name.encode() + state[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


NETWORKS = {
    "mlp": lambda: make_network("mlp", "cosine", vectors(), seed=0),
    "small": lambda: make_network("small", "linear", images(), seed=0),  # with batch norms
}


def trained(kind: str, loss: str, distributes: bool = True, **settings: Any) -> tuple[dict[str, Tensor], Epochs]:
    """A network after three epochs, and its hash after each."""
    samples = images() if kind == "small" else vectors(settings.pop("count", 43))
    network = NETWORKS[kind]().grown(4, 0, "head")
    noise = {"gradient_noise": 0.3} if loss == "noise" else {}
    light = {"brightness": 63.0, "contrast": 0.8} if loss == "light" else {}
    given = {"epochs": 3, "batch_size": 16, "learning_rate": 0.1, "weight_decay": 1e-3, **noise, **light, **settings}
    epochs = Epochs(network)

    def value(inputs: Tensor, columns: Tensor) -> Tensor:
        if loss == "head":
            with torch.no_grad():
                features = network.features(inputs)
            return nn.functional.cross_entropy(network.head(features), columns)
        total = nn.functional.cross_entropy(network(inputs)[1], columns)
        return total + network(inputs)[0].square().mean() if loss == "twice" else total

    def alone(_: nn.Module, loss: Loss) -> Any:
        return nullcontext(lambda inputs, columns, weight: loss(inputs, columns))

    with nullcontext() if distributes else mock.patch.object(parallel, "distributed_step", alone):
        Training(**given).fit(network, samples, samples.labels, value, seed=3, task=0, progress=epochs)
    epochs.network = None  # type: ignore[assignment]
    return network.state_dict(), epochs


def trainings(kinds: list[tuple[str, str, dict[str, Any]]]) -> list[tuple[dict[str, Tensor], Epochs]]:
    return [trained(kind, loss, **settings) for kind, loss, settings in kinds]


def not_finite() -> str:
    """The error for a loss that is infinite for one sample, in the share of one rank, with a finite gradient."""
    network, samples = NETWORKS["mlp"]().grown(4, 0, "head"), vectors()

    def value(inputs: Tensor, columns: Tensor) -> Tensor:
        worst = (inputs == samples.inputs[7]).all(1).any()
        return network(inputs)[1].mean() + (torch.tensor(float("inf")) if worst else 0.0)

    return refusal(lambda: Training(batch_size=64).fit(network, samples, samples.labels, value, seed=0, task=0))


def gradients(exactly: bool = False) -> Tensor:
    """The gradient of a batch of 16 in a ResNet-32; `exactly`: in float64, in one process."""
    samples = images(16, side=32)
    network = make_network("resnet32", "cosine", samples, seed=0).grown(4, 0, "head").train()
    inputs = samples.inputs
    if exactly:
        network.double()
        inputs = (inputs / 255 - network.mean) / network.std

    def loss(inputs: Tensor, columns: Tensor) -> Tensor:
        features = network.extractor(inputs.permute(0, 3, 1, 2)) if exactly else network.features(inputs)
        return nn.functional.cross_entropy(network.head(features), columns)

    share = parallel.share(16)
    with parallel.distributed_step(network, loss) as step:
        step(inputs[share.rows], samples.labels[share.rows], share.weight).backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in network.parameters()])  # type: ignore[union-attr]


# Batch norm


def norm_of(kind: str) -> nn.Module:
    """A batch norm with learned weights."""
    made = {
        "2d": lambda: nn.BatchNorm2d(5),
        "1d": lambda: nn.BatchNorm1d(5),
        "plain": lambda: nn.BatchNorm2d(5, affine=False),
        "untracked": lambda: nn.BatchNorm2d(5, track_running_stats=False),
        "cumulative": lambda: nn.BatchNorm2d(5, momentum=None),
    }[kind]()
    if made.weight is not None:
        with torch.no_grad():
            made.weight.copy_(torch.linspace(0.5, 2, 5))
            made.bias.copy_(torch.linspace(-1, 1, 5))
    return made


def normalised(kind: str) -> tuple[Tensor, ...]:
    """Outputs, gradients and running statistics after two batches of seven samples, sharded over the ranks."""
    network = nn.Sequential(norm_of(kind))
    answers, gradients = [], []
    for seed in (0, 1):
        draws = torch.Generator().manual_seed(seed)
        x = 3 + 2 * torch.randn(7, 5, *[] if kind == "1d" else [4, 3], generator=draws)
        x = x.to(memory_format=torch.channels_last) if kind == "2d" else x
        weights = torch.randn(x.shape, generator=draws)
        rows = parallel.share(7).rows
        own = x[rows].clone().requires_grad_(True)
        with parallel.synchronised(network) if parallel.is_distributed() else nullcontext():
            answer = network(own)
            (answer * weights[rows]).sum().backward()
        answers.append(answer.detach())
        gradients.append(own.grad)
    norm = network[0]
    learned = [each.grad for each in norm.parameters()]
    return torch.cat(answers), torch.cat(gradients), *learned, *norm.buffers()  # type: ignore[arg-type]


def normalised_all() -> dict[str, tuple[Tensor, ...]]:
    return {kind: normalised(kind) for kind in ("2d", "1d", "plain", "untracked", "cumulative")}


# Extraction


def extracted(counts: tuple[int, ...]) -> list[Tensor]:
    network = NETWORKS["small"]().grown(4, 0, "head")
    return [extract(network, images(count)) for count in counts]


# Methods


def stream() -> Stream:
    return split(blobs(), classes_per_task=2, seed=0).first(2)


def learned(methods: list[str]) -> dict[str, dict[str, Tensor]]:
    """The state of each method after two tasks."""
    states = {}
    for method in methods:
        learner = quick(method, device="cpu")
        for task in stream():
            learner.learn(task)
        states[method] = learner.state()
    return states


# Runs


def ran_twice(folder: Path) -> list[dict[str, Any]]:
    """Two consecutive runs from Python; each rank has its own folder, and only rank 0 writes."""
    own = folder / os.environ["RANK"]
    assert not parallel.is_distributed()
    return [run(quick("features", device="cpu"), stream(), out=own / name).to_json() for name in ("a", "b")]
