"""Find identical images, byte for byte, and similar ones by a perceptual hash."""

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from library.config.outside_files import open_regular
from library.config.problems import ConfigError, Message, Report
from library.curation import thumbs

Hash = tuple[int, int]
# Rescaling and saving again change a few bits, another image about half of them.
# Why: docs/decisions/2026-11-20-similar-images.md
NEAR = 10  # of 128 bits may differ; noise and rescaling change fewer, another image about 64
MIN_SPREAD = 2.0  # spread of grey levels below which a hash is meaningless
ROWS = 512  # hashes compared with all others at once; more would take too much memory


def same_bytes(files: Iterable[tuple[str, int]], report: Report | None = None) -> list[list[str]]:
    """Return groups of files with the same content, from (path, length in bytes). Only files of equal length are
    read."""
    by_length: defaultdict[int, list[str]] = defaultdict(list)
    for path, length in files:
        by_length[length].append(path)
    doubtful = [path for paths in by_length.values() if len(paths) > 1 for path in paths]
    by_content: defaultdict[str, list[str]] = defaultdict(list)
    for at, path in enumerate(doubtful):
        if report:
            report(Message("comparing files"), at, len(doubtful))
        try:
            with open_regular(path) as file:
                by_content[hashlib.file_digest(file, "blake2b").hexdigest()].append(path)
        except OSError:
            continue
    return sorted(sorted(paths) for paths in by_content.values() if len(paths) > 1)


# imagehash computes the same bits, but would add scipy and PyWavelets.
# Why: docs/decisions/2026-11-22-no-imagehash.md
def looks(path: str) -> Hash | None:
    """Return a difference hash of 128 bits: whether the image gets brighter to the right, and downwards, in 8 x 8
    places.

    None when it cannot be read, or is too plain for a meaningful hash.
    """
    try:
        with Image.open(io.BytesIO(thumbs.thumb(path, upright=True))) as image:
            backed = Image.new("RGB", image.size, (128, 128, 128))
            backed.paste(image, mask=image.getchannel("A") if "A" in image.getbands() else None)
    except (ConfigError, OSError):
        return None
    grey = np.asarray(backed.convert("L").resize((9, 9), Image.Resampling.BOX), dtype=np.int16)
    if grey.std() < MIN_SPREAD:
        return None
    right, down = grey[:8, 1:] > grey[:8, :-1], grey[1:, :8] > grey[:-1, :8]
    return _number_of_bits(right), _number_of_bits(down)


def near(hashes: Sequence[Hash | None], max_bits: int = NEAR) -> list[list[int]]:
    """Return groups of positions of similar images, connected directly or through others. At most `max_bits` of two
    hashes differ."""
    positions = [at for at, image_hash in enumerate(hashes) if image_hash is not None]
    bits = np.array([hashes[at] for at in positions], dtype=np.uint64).reshape(-1, 2)
    parent = list(range(len(positions)))

    # Union-find: `parent` leads from each image to the representative of its group.
    def find(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]  # path halving keeps the chains short
            at = parent[at]
        return at

    for start in range(0, len(positions), ROWS):
        rows = bits[start : start + ROWS]
        distances = np.bitwise_count(rows[:, None, :] ^ bits[None, :, :]).sum(axis=2, dtype=np.uint16)
        for row, other in zip(*np.nonzero(distances <= max_bits), strict=True):
            if start + row < other:
                parent[find(int(other))] = find(int(start + row))
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for at, position in enumerate(positions):
        groups[find(at)].append(position)
    return [group for group in groups.values() if len(group) > 1]


def _number_of_bits(bits: np.ndarray) -> int:
    return int.from_bytes(np.packbits(bits.flatten()).tobytes(), "big")
