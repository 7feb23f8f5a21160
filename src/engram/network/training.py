"""The training loop: every method trains its network by `Training.fit`."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeVar, cast

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.optim import Optimizer

from engram.data import Samples
from engram.data.augment import Shard, crop_and_flip, jitter, random_crop, random_resized_crop
from engram.errors import TrainingError, UsageError
from engram.network import parallel
from engram.network.network import Network, has_bfloat16
from engram.progress import SILENT, Progress
from engram.randomness import generator, seeded
from engram.storage import tensors_of

Loss = Callable[[Tensor, Tensor], Tensor]  # (augmented inputs, class indices (n,)) -> scalar, a mean over the inputs
GradientHook = Callable[[torch.Generator], None]  # changes the network's gradients between backward and step
Kind = TypeVar("Kind", bound=Optimizer)

LARGE_SIDE = 24  # pixels. Smaller images train in seconds, and in float32 to the same bits on most machines.
NOT_COMMITTED = "The task was not committed. A lower learning rate usually helps: --set learning_rate=…"


class EpochCheckpoints(Protocol):
    """Where training stores its state after an epoch, so that it can resume."""

    def load(self) -> dict[str, Tensor] | None:
        """The last checkpoint, if there is one."""

    def save(self, collect: Callable[[], dict[str, Tensor]]) -> None:
        """Called after every epoch; `collect` gives the state, if it is to be saved now."""


@functools.cache
def uncompiled(kind: type[Kind]) -> type[Kind]:
    """The same optimiser without torch's compiler, whose import takes more than a second."""
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")  # wrapped for the compiler
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return cast("type[Kind]", type(kind.__name__, (kind,), {**methods, "step": step}))


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network is trained on one task. The defaults are the paper's for CIFAR-100 (§5.1, after iCaRL's code)."""

    epochs: PositiveInt = 70  # §5.1; 60 on ImageNet
    batch_size: PositiveInt = 128  # §5.1
    learning_rate: PositiveFloat = 2.0  # §5.1, for a loss divided by the data set's number of classes
    momentum: NonNegativeFloat = 0.9  # iCaRL's code
    weight_decay: NonNegativeFloat = 1e-5  # §5.1
    schedule: Literal["steps", "one-cycle"] = "steps"  # steps: §5.1
    # §5.1: after these shares of the epochs the learning rate is divided
    milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (50 / 70, 64 / 70)
    learning_rate_decay: PositiveFloat = 5.0  # §5.1: the divisor
    warm_up: PositiveFloat = 0.3  # one-cycle: share of the steps in which the learning rate rises
    pad: NonNegativeInt = 4  # iCaRL's code: zeros around an image before it is cropped back at random
    flip: bool = True  # iCaRL's code: mirror half of the images
    crop: PositiveInt | None = None  # iCaRL's code: 224 of ImageNet's 256; random in training, the centre otherwise
    crop_area: tuple[float, float] | None = None  # range of the share of the area, e.g. .08 to 1; resized to crop
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # range of width over height of such crops
    brightness: NonNegativeFloat = 0.0  # EEIL, §4.1: 63; largest change, for a third of the images
    contrast: NonNegativeFloat = 0.0  # EEIL, §4.1: 0.8; largest change of the factor, for another third
    gradient_noise: NonNegativeFloat = 0.0  # EEIL, §4.1: η = 0.3, of noise on the gradient of a batch's sum
    gradient_noise_decay: NonNegativeFloat = 0.55  # EEIL, §4.1: γ; the noise of epoch e is η / (1 + e)^γ
    # bfloat16: mixed precision, with float32 weights. auto: bfloat16 if the device has it and images are large.
    precision: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self) -> None:
        if self.crop_area is None:
            return
        if self.crop is None:
            raise UsageError("crop_area needs crop, the size that crops are resized to.")
        if not 0 < self.crop_area[0] <= self.crop_area[1] <= 1:
            raise UsageError(f"crop_area must be two shares in 0..1, the smaller first; found {self.crop_area}.")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise UsageError(f"crop_ratio must be two positive numbers, the smaller first; found {self.crop_ratio}.")

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
        gradient_hook: GradientHook | None = None,
    ) -> None:
        """Train `network` in place on `samples` with class indices (n,), from the last checkpoint on."""
        settings = {"momentum": self.momentum, "weight_decay": self.weight_decay, "fused": True}
        optimiser: Optimizer = uncompiled(torch.optim.SGD)(network.parameters(), **settings)
        first = _resume(network, optimiser, checkpoints)
        per_epoch, device = self.batches_per_epoch(samples), network.mean.device
        with (
            progress.phase(phase, self.epochs * per_epoch) as running,
            ExitStack() as stack,
            parallel.distributed_step(network, self._with_precision(loss, samples.shape, device)) as step,
        ):
            running.advance(first * per_epoch)
            for epoch in range(first, self.epochs):
                network.train()
                losses = []
                batches = stack.enter_context(closing(self.batches(samples, seed, task, epoch)))
                for number, (inputs, positions) in enumerate(batches):  # this rank's inputs; (n,) of the global batch
                    learning_rate = self.learning_rate_at(epoch * per_epoch + number, self.epochs * per_epoch)
                    optimiser.param_groups[0]["lr"] = learning_rate
                    optimiser.zero_grad()
                    share = parallel.share(len(positions))
                    with _explain_single_sample(), seeded(seed, "forward", task, epoch, number, share.rows.start):
                        targets = class_indices[positions[share.rows]].to(device)
                        value = step(inputs.to(device), targets, share.weight)
                    value.backward()
                    self._add_noise(network, len(positions), epoch, generator(seed, "noise", task, epoch, number))
                    if gradient_hook is not None:
                        gradient_hook(generator(seed, "gradients", task, epoch, number))
                    losses.append(_checked(parallel.mean(value), network, task, epoch, number))
                    optimiser.step()
                    running.advance(note=f"epoch {epoch + 1}/{self.epochs}, loss {losses[-1]:.4f}")
                running.log(epoch=epoch + 1, loss=sum(losses) / len(losses), learning_rate=learning_rate)
                if checkpoints is not None and epoch + 1 < self.epochs:
                    checkpoints.save(functools.partial(_state, network, optimiser, epoch + 1))
        # Batch norms may have seen infinite activations although every weight is finite.
        if not all(bool(tensor.isfinite().all()) for tensor in network.eval().state_dict().values()):
            raise TrainingError(f"A weight is not finite after task {task + 1}. {NOT_COMMITTED}")

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate at a step, from 0, out of `steps`."""
        if self.schedule == "steps":
            epoch = step * self.epochs // steps
            passed = sum(epoch >= max(1, round(share * self.epochs)) for share in self.milestones)
            return self.learning_rate / self.learning_rate_decay**passed
        rising = max(1.0, self.warm_up * steps)
        if step < rising:
            return self.learning_rate * (step + 1) / (rising + 1)
        return self.learning_rate * (1 + math.cos(math.pi * (step - rising) / max(1.0, steps - rising))) / 2

    def batches_per_epoch(self, samples: Samples) -> int:
        return -(-len(samples) // self.batch_size)

    def batches(
        self, samples: Samples, seed: int, task: int, epoch: int
    ) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Augmented inputs of this rank's share, and positions of the global batch, for every batch of an epoch.

        They are a function of the arguments alone. Close the generator if it may not be exhausted: it may prefetch.
        """
        order = torch.randperm(len(samples), generator=generator(seed, "order", task, epoch))
        # Batches of equal size, within one: a last batch of a few samples would upset batch norms.
        batches = order.tensor_split(self.batches_per_epoch(samples))
        shards = [Shard(parallel.share(len(positions)).rows, len(positions)) for positions in batches]
        own = [positions[shard.rows] for positions, shard in zip(batches, shards, strict=True)]
        with closing(samples.batches(own)) as loaded:
            for number, (positions, shard, inputs) in enumerate(zip(batches, shards, loaded, strict=True)):
                if inputs.ndim == 4:
                    inputs = self._augment(inputs, generator(seed, "augment", task, epoch, number), shard)
                yield inputs, positions

    def _augment(self, images: Tensor, draws: torch.Generator, shard: Shard) -> Tensor:
        if self.crop is not None and self.crop_area is not None:
            images = random_resized_crop(images, self.crop, self.crop_area, self.crop_ratio, draws, shard)
        elif self.crop is not None:
            images = random_crop(images, (self.crop, self.crop), draws, shard)
        images = crop_and_flip(images, self.pad, self.flip, draws, shard)
        if self.brightness or self.contrast:
            images = jitter(images, self.brightness, self.contrast, draws, shard)
        return images

    def resolved_precision(self, shape: tuple[int, ...], device: torch.device) -> str:
        """What `precision` stands for, given the shape of one input."""
        if self.precision != "auto":
            return self.precision
        large = len(shape) == 3 and min(shape[:2]) >= LARGE_SIDE
        return "bfloat16" if large and has_bfloat16(device) else "float32"

    def _with_precision(self, loss: Loss, shape: tuple[int, ...], device: torch.device) -> Loss:
        if self.resolved_precision(shape, device) == "float32":
            return loss

        def mixed(inputs: Tensor, class_indices: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return loss(inputs, class_indices).float()

        return mixed

    def _add_noise(self, network: Network, batch: int, epoch: int, draws: torch.Generator) -> None:
        """Add noise to the gradient. EEIL's code adds it to that of a sum over the batch; ours is of a mean."""
        if not self.gradient_noise:
            return
        deviation = self.gradient_noise / (1 + epoch) ** self.gradient_noise_decay / batch
        for parameter in network.parameters():
            if parameter.grad is not None:
                noise = torch.randn(parameter.shape, generator=draws)
                parameter.grad.add_(noise.to(parameter.device), alpha=deviation)


@contextmanager
def _explain_single_sample() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise TrainingError(
            "The batch norms of this network need more than one value per channel, and a batch of one sample gives "
            "one. The task was not committed. Use a larger batch size, more samples, or another network."
        ) from error


def _checked(loss: Tensor, network: Network, task: int, epoch: int, number: int) -> float:
    """The loss as a number; an error if it or its gradient is not finite."""
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    value, steepness = map(float, torch.stack([loss.detach(), norm]).tolist())  # one transfer from the device
    if not math.isfinite(value + steepness):
        what = "gradient" if math.isfinite(value) else "loss"
        where = f"task {task + 1}, epoch {epoch + 1}, batch {number + 1}"
        raise TrainingError(f"The {what} is not finite at {where}. {NOT_COMMITTED}")
    return value


def _state(network: Network, optimiser: Optimizer, epoch: int) -> dict[str, Tensor]:
    state = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    for index, buffers in optimiser.state_dict()["state"].items():
        state[f"momentum.{index}"] = buffers["momentum_buffer"]
    return state | {"epoch": torch.tensor(epoch)}


def _resume(network: Network, optimiser: Optimizer, checkpoints: EpochCheckpoints | None) -> int:
    """Load the last checkpoint, if there is one; the number of epochs that are done."""
    state = parallel.broadcast(lambda: checkpoints.load() if checkpoints is not None else None)
    if state is None:
        return 0
    network.load_state_dict(tensors_of(state, "network"))
    buffers = {int(index): {"momentum_buffer": tensor} for index, tensor in tensors_of(state, "momentum").items()}
    optimiser.load_state_dict({**optimiser.state_dict(), "state": buffers})
    # The fused step needs the same memory layout for a weight and its momentum, and a file has no channels-last layout.
    for parameter, loaded in optimiser.state.items():
        loaded["momentum_buffer"] = torch.empty_like(parameter).copy_(loaded["momentum_buffer"])
    return int(state["epoch"])
