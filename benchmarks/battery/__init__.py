"""The sections of the battery of attacks, which `benchmarks/attacks.py` runs."""

from __future__ import annotations

from battery import folders, fuzzing, kills, many, service
from battery.step import Step

SECTIONS: dict[str, dict[str, Step]] = {
    "kills": kills.KILLS | service.KILLS,
    "damage": folders.DAMAGE,
    "forgery": folders.FORGERY,
    "protocol": service.PROTOCOL,
    "bombs": service.BOMBS,
    "floods": service.FLOODS,
    "disk": kills.DISK | service.DISK,
    "torchrun": many.STEPS,
    "fuzz": fuzzing.STEPS,
}
WHEN_NAMED = ("torchrun", "fuzz")  # an hour each

__all__ = ["SECTIONS", "WHEN_NAMED", "Step"]
