"""Warnings about the images of an update: classes of one image, unequal classes, near-duplicates across classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.nn import functional as F

from engram.methods import Learner, MemorySources
from engram.model.plan import UpdatePlan
from engram.text import printable

UNEQUAL = 10  # times as many images of one class as of another
# The cosine between the features of two images, in a pretrained network, above which they are nearly the same image:
# among 40 classes of Caltech-101 no two images of different classes exceed .79.
NEAR_DUPLICATE = 0.95
LISTED = 5


def warning_signs(learner: Learner, plan: UpdatePlan, kept: MemorySources, paths: Sequence[Path]) -> tuple[str, ...]:
    """A sentence each. `paths` name the samples of the update; `kept` says where each stored feature came from."""
    return tuple((*_class_sizes(plan), *_near_duplicates(learner, plan, kept, paths)))


def _class_sizes(plan: UpdatePlan) -> Iterator[str]:
    if len(plan.names) == 1:
        yield "The model knows only one class, and so predicts it for any image. Teach it a second one."
    single = [name for name, count in plan.new.items() if count == 1]
    if single:
        others = f" and {len(single) - LISTED} more" if len(single) > LISTED else ""
        yield f"Only one image: {', '.join(map(printable, single[:LISTED]))}{others}. Give at least five of a class."
    counts = {name: count for name, count in {**plan.new, **plan.more}.items() if count}
    most, fewest = max(counts, key=lambda name: counts[name]), min(counts, key=lambda name: counts[name])
    if counts[most] >= UNEQUAL * counts[fewest]:
        sizes = f"{counts[most]} images of {printable(most)}, {counts[fewest]} of {printable(fewest)}"
        yield f"Classes are very unequal: {sizes}. Small classes are recognised less reliably."


def _near_duplicates(learner: Learner, plan: UpdatePlan, kept: MemorySources, paths: Sequence[Path]) -> Iterator[str]:
    """Images of the update whose features are almost those of an image of another class."""
    memory, sources = learner.memory.features, kept.features
    if not learner.is_pretrained or len(learner.shape_) != 3 or not len(memory):
        return
    # Some networks give all images similar features; without their mean they differ.
    rows, class_indices = F.normalize(memory.rows - memory.rows.mean(0)), memory.class_indices
    found: dict[frozenset[int], tuple[int, int]] = {}  # two classes -> two rows
    for some in (sources >= 0).nonzero().squeeze(1).split(1024):
        cosines = rows[some] @ rows.T  # (r, n)
        cosines[class_indices[some][:, None] == class_indices] = -1
        nearest = cosines.max(1)
        for place in (nearest.values > NEAR_DUPLICATE).nonzero().squeeze(1).tolist():
            row, other = int(some[place]), int(nearest.indices[place])
            found.setdefault(frozenset(class_indices[[row, other]].tolist()), (row, other))

    def named(row: int) -> str:
        name, source = printable(plan.names[int(class_indices[row])]), int(sources[row])
        return f"{printable(paths[source])} ({name})" if 0 <= source < len(paths) else f"an image of {name}"

    for row, other in list(found.values())[:LISTED]:
        yield f"Nearly the same image in two classes: {named(row)} and {named(other)}. Is one of them mislabelled?"
    if (others := len(found) - LISTED) > 0:
        yield f"Nearly the same image in two classes: {others} more {'pair' if others == 1 else 'pairs'} of classes."
