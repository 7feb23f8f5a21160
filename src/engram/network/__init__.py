"""Feature extractors and heads, their losses, and the training loop."""

from engram.network import parallel
from engram.network.cache import Cache
from engram.network.network import (
    HEADS,
    Carried,
    CorrectedHead,
    CosineHead,
    Head,
    LinearHead,
    Network,
    ShiftedHead,
    TrainableWeights,
    choose_device,
    extract,
    has_bfloat16,
    make_network,
    restore_network,
    unchanged_statistics,
)
from engram.network.registry import (
    DEFAULT_PRETRAINED,
    NETWORKS,
    check_name,
    choose_extractor,
    describe_network,
    extractor_for_weights,
    input_size,
    is_pretrained,
    portable_name,
    threads_for,
)
from engram.network.training import EpochCheckpoints, GradientHook, Loss, Training

__all__ = ["DEFAULT_PRETRAINED", "HEADS", "NETWORKS", "Cache", "Carried", "CorrectedHead", "CosineHead"]
__all__ += ["EpochCheckpoints", "Head", "LinearHead", "Loss", "Network", "TrainableWeights", "Training", "check_name"]
__all__ += ["choose_device", "choose_extractor", "describe_network", "extract", "extractor_for_weights", "input_size"]
__all__ += ["is_pretrained", "make_network", "parallel", "portable_name", "restore_network", "threads_for"]
__all__ += ["GradientHook", "ShiftedHead", "has_bfloat16", "unchanged_statistics"]
