"""Names of files on the Hugging Face Hub as values of options, without asking the hub."""

import re
from pathlib import Path

PART = re.compile(r"(?![.-])[\w .()+-]{1,150}(?<![. ])", re.ASCII)  # of the name of a file in a repository


def is_file_id(name: str) -> bool:
    """Whether a name has the form owner/name/file.safetensors, also with folders, and is no path on this computer."""
    parts = name.split("/")
    is_plain = all(PART.fullmatch(part) for part in parts) and "--" not in "/".join(parts[:2])
    return len(parts) > 2 and is_plain and name.endswith(".safetensors") and not Path(parts[0]).exists()
