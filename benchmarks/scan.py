"""How long the look at a large data set takes before a training: `python benchmarks/scan.py [images]`.

Writes so many tiny pictures with captions into a temporary folder, and times a scan with sizes that are known (from the
names of cached latents) and one that has to read headers. Files that were just written are in the system's memory: a
disk adds its own time.
"""

import io
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from library import data, families
from library.config.building import build_config


def write_pictures(folder: Path, count: int, cached: bool) -> None:
    """Pictures with captions, and where wanted the names of their cached latents."""
    folder.mkdir(parents=True)
    picture = io.BytesIO()
    Image.new("RGB", (96, 64)).save(picture, "PNG")
    for number in range(count):
        (folder / f"{number:06d}.png").write_bytes(picture.getvalue())
        (folder / f"{number:06d}.txt").write_text("cat, sitting", encoding="utf-8")
        if cached:
            (folder / f"{number:06d}_0096x0064_sdxl.npz").touch()


def print_times(what: str, work: Callable[[], Any]) -> None:
    """Print the seconds of the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    print(f"{what}: {time.perf_counter() - clock:.1f} s, {time.process_time() - processor:.1f} s of the processor")


def main(count: int) -> None:
    """Time all four looks."""
    with tempfile.TemporaryDirectory(prefix="kohya-scan-") as place:
        for cached in (True, False):
            folder = Path(place) / ("known" if cached else "unknown")
            write_pictures(folder / "1_cat", count, cached)
            values = {
                "train_data_dir": str(folder),
                "resolution": "96",
                "min_bucket_reso": 64,
                "enable_bucket": True,
                "caption_extension": ".txt",
                "cache_latents_to_disk": cached,
            }
            config = build_config(families.config_class("sdxl_train_network"), values, notes=[])
            print_times(f"scan of {count} images, sizes {folder.name}", lambda config=config: data.scan(config))
            print_times(
                f"check of {count} images, sizes {folder.name}", lambda config=config: data.check_data(config, 32)
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
