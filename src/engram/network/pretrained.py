"""`Pretrained`: an extractor with published weights, and the inputs that these weights were trained with."""

from __future__ import annotations

from typing import ClassVar

from torch import nn


class Pretrained(nn.Module):
    """An extractor that comes with weights. Subclasses map normalised images (n, 3, s, s) to features (n, d).

    Images of any other size are resized to `input_size`, and normalised as (x / 255 − mean) / std per channel.
    """

    input_size: int
    input_mean: tuple[float, float, float]
    input_std: tuple[float, float, float]

    # Whether it may answer in bfloat16 on devices that compute in it: features of trained networks bear the rounding.
    answers_in_bfloat16: ClassVar[bool] = True
