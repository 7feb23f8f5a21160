"""HEIC photos are decoded in the limited processes."""

from __future__ import annotations

import io

import numpy as np
from images_made import gradient, heic, needs_heic
from models_made import DAISY, TULIP
from PIL import Image
from server_made import Serve, files, image_bytes

pytestmark = needs_heic


def photo(name: str) -> bytes:
    return heic(Image.open(io.BytesIO(image_bytes(name))).resize((64, 48), Image.Resampling.BICUBIC), quality=90)


def test_a_photo_is_classified_without_a_decoder_dying(serve: Serve) -> None:
    client = serve()
    answers = client.post("/api/classify", files=files(photo(TULIP), photo(DAISY))).json()["predictions"]
    assert [answer["top"][0]["class"] for answer in answers] == [TULIP, DAISY]
    assert "engram_decoder_restarts_total 0.0" in client.get("/metrics").text


def test_a_large_photo_in_tiles_fits_the_memory_of_a_decoder(serve: Serve) -> None:
    """Tiles are decoded in several threads, each with its own stack."""
    client = serve()
    decoders = client.app.state.services.decoders  # type: ignore[attr-defined]
    content = heic(gradient(1500, 2000), tile_size=256, quality=50, chroma=420, enc_params={"preset": "ultrafast"})
    expected = np.array(Image.fromarray(gradient(1500, 2000)[:, 250:1750]).resize((16, 16), Image.Resampling.BICUBIC))
    assert np.abs(decoders.decode(content, 16).numpy() - expected.astype(float)).max() <= 10
    assert "engram_decoder_restarts_total 0.0" in client.get("/metrics").text


def test_a_photo_of_too_many_pixels_is_not_decoded(serve: Serve) -> None:
    (response,) = serve(pixels=1000).post("/api/classify", files=files(photo(TULIP))).json()["predictions"]
    assert "1,000" in response["problem"]
