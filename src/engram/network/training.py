"""The training loop: every method trains its network through `Training.fit`."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from engram.data import Samples
from engram.data.augment import Shard, crop_and_flip, jitter, random_crop, random_resized_crop
from engram.errors import TrainingError, UsageError
from engram.network import parallel
from engram.network.network import Network
from engram.network.optimisers import uncompiled
from engram.progress import SILENT, Progress
from engram.randomness import generator, seeded

Loss = Callable[[Tensor, Tensor], Tensor]  # (a batch of inputs, augmented; their columns (n,)) -> a scalar


class EpochCheckpoints(Protocol):
    """Where training under way is kept, so that a killed one can go on."""

    def load(self) -> dict[str, Tensor] | None:
        """What was saved last, if anything."""

    def save(self, collect: Callable[[], dict[str, Tensor]]) -> None:
        """A moment at which saving is possible; `collect` gives what to save, if it is to be done now."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network is trained on one task. The defaults are the paper's for CIFAR-100 (§5.1, after iCaRL's code)."""

    epochs: PositiveInt = 70  # §5.1; 60 on ImageNet
    batch_size: PositiveInt = 128  # §5.1
    learning_rate: PositiveFloat = 2.0  # §5.1, for a loss divided by the data set's number of classes
    momentum: NonNegativeFloat = 0.9  # iCaRL's code
    weight_decay: NonNegativeFloat = 1e-5  # §5.1
    schedule: Literal["steps", "one-cycle"] = "steps"  # steps: §5.1
    # §5.1, as shares of the epochs; the rate is divided after each
    milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (50 / 70, 64 / 70)
    learning_rate_decay: PositiveFloat = 5.0  # §5.1: what the rate is divided by
    warm_up: PositiveFloat = 0.3  # of one-cycle: the share of the steps in which the rate rises
    pad: NonNegativeInt = 4  # iCaRL's code: zeros around an image before it is cropped back at random
    flip: bool = True  # iCaRL's code: mirror half of the images
    crop: PositiveInt | None = None  # iCaRL's code: 224 of ImageNet's 256; at random, and when answering the middle
    crop_area: tuple[float, float] | None = None  # windows of such a share of the area, say .08 to 1, scaled to `crop`
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # ... and their width over height
    brightness: NonNegativeFloat = 0.0  # EEIL, §4.1: 63; the most that is added to a third of the images
    contrast: NonNegativeFloat = 0.0  # EEIL, §4.1: 0.8; the most by which another third's differs from 1
    gradient_noise: NonNegativeFloat = 0.0  # EEIL, §4.1: η = 0.3, of noise on the gradient of a batch's sum
    gradient_noise_decay: NonNegativeFloat = 0.55  # EEIL, §4.1: γ; the noise of epoch e is η / (1 + e)^γ
    precision: Literal["float32", "bfloat16"] = (
        "float32"  # bfloat16: mixed, for devices that compute in it; weights stay float32
    )

    def __post_init__(self) -> None:
        if self.crop_area is not None:
            if self.crop is None:
                raise UsageError("Windows of a share of the area are scaled to a size: give crop with crop_area.")
            if not 0 < self.crop_area[0] <= self.crop_area[1] <= 1:
                raise UsageError(
                    f"The shares of the area must lie between 0 and 1, the smaller first; found {self.crop_area}."
                )
            if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
                raise UsageError(f"Width over height must be above 0, the smaller first; found {self.crop_ratio}.")

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate at a step, counted from 0, of so many."""
        if self.schedule == "steps":
            epoch = step * self.epochs // steps
            passed = sum(epoch >= max(1, round(share * self.epochs)) for share in self.milestones)  # never at once
            return self.learning_rate / self.learning_rate_decay**passed
        rising = max(1.0, self.warm_up * steps)
        if step < rising:
            return self.learning_rate * (step + 1) / (rising + 1)
        return self.learning_rate * (1 + math.cos(math.pi * (step - rising) / max(1.0, steps - rising))) / 2

    def batches(
        self, samples: Samples, seed: int, task: int, epoch: int
    ) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Inputs, augmented, and positions of each batch of an epoch: a function of the arguments alone.

        Of several processes each gets the inputs of its share of the batch (`parallel.share`), and all positions. To be
        closed by whoever may not go through to the end: threads may be reading ahead.
        """
        order = torch.randperm(len(samples), generator=generator(seed, "order", task, epoch))
        # Parts of equal size, within one: a last batch of a few samples would upset batch norm.
        whole = order.tensor_split(self.batches_per_epoch(samples))
        parts = [Shard(parallel.share(len(positions)).rows, len(positions)) for positions in whole]
        own = [positions[part.rows] for positions, part in zip(whole, parts, strict=True)]
        with closing(samples.batches(own)) as ready:
            for number, (positions, shard, inputs) in enumerate(zip(whole, parts, ready, strict=True)):
                if inputs.ndim == 4:
                    inputs = self._augmented(inputs, generator(seed, "augment", task, epoch, number), shard)
                yield inputs, positions

    def _augmented(self, images: Tensor, draws: torch.Generator, shard: Shard) -> Tensor:
        if self.crop is not None and self.crop_area is not None:
            images = random_resized_crop(images, self.crop, self.crop_area, self.crop_ratio, draws, shard)
        elif self.crop is not None:
            images = random_crop(images, self.crop, draws, shard)
        images = crop_and_flip(images, self.pad, self.flip, draws, shard)
        if self.brightness or self.contrast:
            images = jitter(images, self.brightness, self.contrast, draws, shard)
        return images

    def batches_per_epoch(self, samples: Samples) -> int:
        """How many batches an epoch has."""
        return -(-len(samples) // self.batch_size)

    def fit(
        self,
        network: Network,
        samples: Samples,
        class_indices: Tensor,
        loss: Loss,
        *,
        seed: int,
        task: int,
        progress: Progress = SILENT,
        checkpoints: EpochCheckpoints | None = None,
        phase: str = "train",
    ) -> None:
        """Train `network` in place to make `loss` small on `samples`, whose classes are the head's `class_indices` (n,).

        A snapshot that is found is gone on from, to the same end: on a CPU to the last bit. `loss` is a mean over the
        samples it is given: of several processes, each gives it a share of the batch.
        """
        optimiser = uncompiled(torch.optim.SGD)(
            network.parameters(), self.learning_rate, self.momentum, weight_decay=self.weight_decay, fused=True
        )
        per_epoch = self.batches_per_epoch(samples)
        steps = self.epochs * per_epoch
        first = _go_on(network, optimiser, checkpoints)
        device = network.mean.device
        with (
            progress.phase(phase, steps) as running,
            ExitStack() as reading,
            parallel.distributed_step(network, self._at_precision(loss, device)) as step,
        ):
            running.advance(first * per_epoch)
            for epoch in range(first, self.epochs):
                network.train()
                losses = []
                batches = reading.enter_context(closing(self.batches(samples, seed, task, epoch)))
                for number, (inputs, positions) in enumerate(batches):
                    optimiser.param_groups[0]["lr"] = self.learning_rate_at(epoch * per_epoch + number, steps)
                    optimiser.zero_grad()
                    share = parallel.share(len(positions))
                    with _explained(), seeded(seed, "forward", task, epoch, number, share.rows.start):  # for dropout
                        value = step(inputs.to(device), class_indices[positions[share.rows]].to(device), share.weight)
                    value.backward()
                    value = parallel.mean(value)
                    if self.gradient_noise:
                        self._disturb(network, len(positions), epoch, generator(seed, "noise", task, epoch, number))
                    where = f"task {task + 1}, epoch {epoch + 1}, batch {number + 1}"
                    losses.append(_finite(value, network, where))
                    optimiser.step()
                    running.advance(note=f"epoch {epoch + 1}/{self.epochs}, loss {losses[-1]:.4f}")
                running.tell(
                    epoch=epoch + 1, loss=sum(losses) / len(losses), learning_rate=optimiser.param_groups[0]["lr"]
                )
                if checkpoints is not None and epoch + 1 < self.epochs:
                    done = epoch + 1
                    checkpoints.save(lambda done=done: _state(network, optimiser, done))  # type: ignore[misc]
        if not all(bool(torch.isfinite(parameter).all()) for parameter in network.parameters()):
            raise TrainingError(  # the last step of all is followed by no loss that would tell
                f"The network is not finite after task {task + 1}. Nothing of this task was kept. "
                "A lower learning rate usually helps: --set learning_rate=…"
            )
        network.eval()

    def _at_precision(self, loss: Loss, device: torch.device) -> Loss:
        """The loss, computed as precisely as was asked for."""
        if self.precision == "float32":
            return loss

        def mixed(inputs: Tensor, class_indices: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return loss(inputs, class_indices).float()

        return mixed

    def _disturb(self, network: Network, batch: int, epoch: int, draws: torch.Generator) -> None:
        """Add noise to the gradient. EEIL's code adds it to that of a sum over the batch; ours is of a mean."""
        deviation = self.gradient_noise / (1 + epoch) ** self.gradient_noise_decay / batch
        for parameter in network.parameters():
            if parameter.grad is not None:
                noise = torch.randn(parameter.shape, generator=draws)
                parameter.grad.add_(noise.to(parameter.device), alpha=deviation)


@contextmanager
def _explained() -> Iterator[None]:
    """Say of the one input that a network cannot be trained on what to do about it."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise TrainingError(
            "This network's batch norms need more than one value of each channel, and a batch of a single sample gives "
            "them one. Nothing of this task was kept. Use a larger batch size, more samples, or another network."
        ) from error


def _finite(loss: Tensor, network: Network, where: str) -> float:
    """The loss as a number, after making sure of it and of its gradient."""
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    value, steepness = map(float, torch.stack([loss.detach(), norm]).tolist())  # one look at the device
    if not math.isfinite(value + steepness):
        raise TrainingError(
            f"The {'gradient' if math.isfinite(value) else 'loss'} is not finite at {where}. Nothing of this task was "
            "kept. A lower learning rate usually helps: --set learning_rate=…"
        )
    return value


def _state(network: Network, optimiser: torch.optim.Optimizer, epoch: int) -> dict[str, Tensor]:
    state = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    for index, buffers in optimiser.state_dict()["state"].items():
        state[f"momentum.{index}"] = buffers["momentum_buffer"]
    return state | {"epoch": torch.tensor(epoch)}


def _go_on(network: Network, optimiser: torch.optim.Optimizer, checkpoints: EpochCheckpoints | None) -> int:
    """Take over the last snapshot, if there is one, and say how many epochs were done."""
    state = parallel.broadcast(lambda: checkpoints.load() if checkpoints is not None else None)
    if state is None:
        return 0
    epoch = int(state.pop("epoch"))
    parts = {name.removeprefix("network."): state[name] for name in state if name.startswith("network.")}
    network.load_state_dict(parts)
    whole = optimiser.state_dict()
    whole["state"] = {
        int(name.removeprefix("momentum.")): {"momentum_buffer": tensor}
        for name, tensor in state.items()
        if name.startswith("momentum.")
    }
    optimiser.load_state_dict(whole)
    # A fused step walks the memory of a parameter and of its momentum side by side, and a file knows rows alone: as it
    # is read, the momentum of a convolution, whose channels come last, would be another weight's.
    for parameter, buffers in optimiser.state.items():
        buffers["momentum_buffer"] = torch.empty_like(parameter).copy_(buffers["momentum_buffer"])
    return epoch
