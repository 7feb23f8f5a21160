"""What learns: extractors and heads, their losses, and the one training loop."""

from engram.network import parallel
from engram.network.cache import Cache
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
from engram.network.threads import threads_for
from engram.network.training import EpochCheckpoints, Loss, Training
from engram.network.weights import extractor_for_weights

__all__ = [
    "DEFAULT_PRETRAINED",
    "HEADS",
    "NAMES",
    "Cache",
    "CorrectedHead",
    "CosineHead",
    "EpochCheckpoints",
    "Head",
    "LinearHead",
    "Loss",
    "Network",
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
    "restore_network",
    "threads_for",
]
