"""Names of files on the Hugging Face Hub as option values; makes no request."""

import re
from pathlib import Path

PART = re.compile(r"(?![.-])[\w .()+-]{1,150}(?<![. ])", re.ASCII)  # part of a file's path in a repository


def is_file_id(name: str) -> bool:
    """Return whether a name has the form owner/name/file.safetensors, possibly with folders, and is no local path."""
    parts = name.split("/")
    is_plain = all(PART.fullmatch(part) for part in parts) and "--" not in "/".join(parts[:2])
    return len(parts) > 2 and is_plain and name.endswith(".safetensors") and not Path(parts[0]).exists()
