"""Ten digits, two at a time: three methods side by side. `make demo` runs this."""

from __future__ import annotations

from pathlib import Path

import engram
from engram.cli.output import Display

METHODS = {
    "finetune": "trains on the new digits alone, and forgets the old ones",
    "features": "the paper's: stores 100 features a digit, and adapts them when the network changes",
    "engram": "ours: the same with stronger feature distillation, a chosen adapter and one byte a number",
}
NEXT = """
What next:
  engram learn mine FOLDER       teach a classifier your own photos, one sub-folder per class (docs/models.md)
  engram run METHOD --dataset …  compare methods on other data (engram methods, engram datasets)
(The command is in .venv/bin: source .venv/bin/activate puts it on the path.)"""


def main(place: Path = Path("runs/demo")) -> None:
    """Run each method, or read what was run before, and print one table."""
    digits = engram.load("digits")
    print("Ten digits of 8 x 8 pixels arrive two at a time; the images of earlier digits are gone.")
    print("Accuracy on test images of all digits so far (guessing: 1 in 10 at the end):\n")
    print("          stored    2     4     6     8    10 digits")
    for method, sentence in METHODS.items():
        with Display() as progress:
            plan = engram.Plan(method=method, preset="short", seed=0)
            result = plan.run(digits, place / method, resume=True, progress=progress)
        curve = "  ".join(f".{round(1000 * value):03d}" if value < 1 else "1.00" for value in result.curve)
        print(f"{method:9} {result.memory_bytes / 1024:3.0f} KB  {curve}   {sentence}")
    print(NEXT)


if __name__ == "__main__":
    main()
