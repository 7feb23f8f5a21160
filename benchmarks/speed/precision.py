"""The second task of gamma-lwf on CIFAR-100 in mixed precision, against the same training in float32."""

from __future__ import annotations

from functools import partial

from side_by_side import Outcome, in_turns, ratio, show, speeds, two_tasks

from engram.methods import Learner, make

IMAGES = 1280  # of the task's 5,000, so that a round takes seconds


def main() -> None:
    few = two_tasks(IMAGES)

    def taught(precision: str) -> Learner:
        learner = make("gamma-lwf", network="resnet32", epochs=1, learning_rate=0.1, precision=precision)
        learner.learn(few[0])
        return learner

    mixed, whole = in_turns(*(partial(taught(name).train, few[1]) for name in ("bfloat16", "float32")), rounds=5)
    show(
        Outcome(
            "training, γ-LwF, ResNet-32, `precision=bfloat16`",
            "the same in float32",
            ratio(whole, mixed),
            1.4,
            detail=f"{speeds(IMAGES, mixed, whole)}, on a CPU with AVX512-BF16.",
        )
    )


if __name__ == "__main__":
    main()
