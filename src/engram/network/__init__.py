"""What learns: extractors and heads, their losses, and the one training loop."""

from engram.network import parallel
from engram.network.extraction import extract
from engram.network.extractors import EXTRACTORS, check_name, choose_extractor, extractor_for_weights
from engram.network.head import HEADS, CorrectedHead, CosineHead, Head, LinearHead
from engram.network.network import Network, make_network, restore_network
from engram.network.remembered import Remembered, remembering
from engram.network.threads import threads_for
from engram.network.training import Loss, Snapshots, Training

__all__ = [
    "EXTRACTORS",
    "HEADS",
    "CorrectedHead",
    "CosineHead",
    "Head",
    "LinearHead",
    "Loss",
    "Network",
    "Remembered",
    "Snapshots",
    "Training",
    "check_name",
    "choose_extractor",
    "extract",
    "extractor_for_weights",
    "make_network",
    "parallel",
    "remembering",
    "restore_network",
    "threads_for",
]
