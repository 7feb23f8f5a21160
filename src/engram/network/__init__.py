"""What learns: extractors and heads, their losses, and the one training loop."""

from engram.network import parallel
from engram.network.catalogue import (
    DEFAULT_PRETRAINED,
    NAMES,
    check_name,
    choose_extractor,
    describe_network,
    input_size,
    is_pretrained,
    networks,
    portable_name,
)
from engram.network.extraction import extract
from engram.network.head import HEADS, CorrectedHead, CosineHead, Head, LinearHead
from engram.network.network import Network, Tuned, make_network, restore_network
from engram.network.remembered import Remembered, remembering
from engram.network.threads import threads_for
from engram.network.training import Loss, Snapshots, Training
from engram.network.weights import extractor_for_weights

__all__ = [
    "DEFAULT_PRETRAINED",
    "HEADS",
    "NAMES",
    "CorrectedHead",
    "CosineHead",
    "Head",
    "LinearHead",
    "Loss",
    "Network",
    "Remembered",
    "Snapshots",
    "Training",
    "Tuned",
    "check_name",
    "choose_extractor",
    "describe_network",
    "extract",
    "extractor_for_weights",
    "input_size",
    "is_pretrained",
    "make_network",
    "networks",
    "parallel",
    "portable_name",
    "remembering",
    "restore_network",
    "threads_for",
]
