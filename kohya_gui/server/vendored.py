"""Files of other projects that the page ships (kohya_gui/vendor), each loaded only where it is used."""

import hashlib
from pathlib import Path

VENDOR_FOLDER = Path(__file__).parents[1] / "vendor"
# name in a markup -> the file; licences are beside the files
NAMES = {"uplot-script": "uplot/uPlot.iife.min.js", "uplot-style": "uplot/uPlot.min.css"}


def _address(name: str) -> str:
    path = VENDOR_FOLDER / name
    # With a hash of the contents, so that browsers may keep it forever.
    return f"scripts/{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}/{path.name}"


ADDRESSES = {name: _address(file) for name, file in NAMES.items()}  # relative to the page
FILES: dict[str, Path | bytes] = {f"/{ADDRESSES[name]}": VENDOR_FOLDER / file for name, file in NAMES.items()}
