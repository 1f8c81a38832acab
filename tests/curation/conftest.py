"""A folder of images with one of each mistake."""

import numpy as np
import pytest
from PIL import Image

from library.config.building import build_config
from library.families.sdxl.options import SdxlLora


def picture(seed, width=72, height=64):
    """A smooth picture of its own."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def config(folder="", **more):
    values = {
        "train_data_dir": str(folder),
        "resolution": "64",
        "caption_extension": ".txt",
        "learning_rate": 1e-4,
        "enable_bucket": True,
        "min_bucket_reso": 32,
        "max_bucket_reso": 128,
        "bucket_reso_steps": 32,
    }
    return build_config(SdxlLora, {**values, **more}, notes=[])


@pytest.fixture
def data(tmp_path):
    root = tmp_path / "data"
    cats, dogs, loose = root / "10_cat", root / "2_dog", root / "later"
    for folder in (cats, dogs, loose):
        folder.mkdir(parents=True)
    for i in range(4):
        picture(i).save(cats / f"{i}.png")
        (cats / f"{i}.txt").write_text(f"zorb, cat, red hat, {i}")
    picture(10).save(dogs / "a.png")
    picture(10, 36, 32).save(dogs / "a small.png")  # looks the same
    (dogs / "b.png").write_bytes((cats / "0.png").read_bytes())  # is the same
    (dogs / "a.txt").write_text("dog, Red Hat\nanother line\n")
    (dogs / "b.txt").write_text("  \n")
    whole = (cats / "1.png").read_bytes()
    (dogs / "broken.png").write_bytes(whole[: len(whole) // 2])
    (dogs / "broken.txt").write_bytes(b"caf\xe9")
    picture(11, 400, 40).save(dogs / "panorama.png")
    picture(12).save(loose / "c.png")
    picture(13).save(root / "d.png")
    return root
