"""Paths and tokens as people write and paste them, in a form, a file or a shell."""

import os
import re
from pathlib import Path
from typing import Any

WINDOWS = os.name == "nt"
# Whitespace, and direction marks that Windows adds to paths copied from a dialog.
AROUND = " \t\r\n\u00a0\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff"
QUOTES = {'"': '"', "'": "'", "\u201c": "\u201d"}
# The variables of Windows that name folders. Others may hold keys, which messages about a path would show.
FOLDER_VARIABLES = (
    *("USERPROFILE", "HOMEDRIVE", "HOMEPATH", "APPDATA", "LOCALAPPDATA", "PUBLIC", "TEMP", "TMP"),
    *("ONEDRIVE", "ONEDRIVECONSUMER", "ONEDRIVECOMMERCIAL", "PROGRAMDATA", "SYSTEMDRIVE", "HF_HOME", "KOHYA_HOME"),
)
VARIABLE = re.compile(rf"%({'|'.join(FOLDER_VARIABLES)})%", re.I)
BELOW_CURRENT_FOLDER = re.compile(r"([A-Za-z]:)([^\\/].*)?", re.S)  # D:images is in the current folder of that drive


def strip_pasted(text: str) -> str:
    """Strip whitespace, quotes and invisible marks around a pasted path or token."""
    text = text.strip(AROUND)
    if len(text) > 1 and QUOTES.get(text[0]) == text[-1]:
        return text[1:-1].strip(AROUND)
    # A program reads the argument "D:\images\" with its last quote, which the backslash before it escapes.
    return text[:-1] if WINDOWS and text[-1:] == '"' and text.count('"') == 1 else text


def lines_of(text: str) -> list[str]:
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


def expand_home(value: Any) -> Any:
    """Return a path with the folder that ~ or, on Windows, a variable such as %USERPROFILE% stands for."""
    if not isinstance(value, str):
        return value
    if WINDOWS:  # a shell replaces them, but neither a form nor a file does
        value = VARIABLE.sub(lambda variable: os.environ.get(variable[1].upper()) or variable[0], value)
    return os.path.expanduser(value) if value == "~" or value[:2] in ("~/", "~\\") else value


def meant_on_drive(path: str) -> str:
    """Return the path that one without a backslash after its drive probably means, D:\\images for D:images; "" for any
    other path.
    """
    match = BELOW_CURRENT_FOLDER.fullmatch(path) if WINDOWS else None
    return f"{match[1]}\\{match[2] or ''}" if match else ""


def pasted_path(text: str) -> Path:
    """Return the path that a text means, without quotes around it and with the home folder for ~."""
    return Path(os.path.expanduser(expand_home(strip_pasted(text))))
