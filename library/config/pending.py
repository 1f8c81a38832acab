"""Options that are declared but that the trainer does not honour yet.

Setting one to anything but its default is an error with the sentence below, because a flag must never be accepted and
ignored. A line leaves this table together with the commit that makes its option work. What will not come back at all
is in retired.py.
"""

from typing import Any

# "option", "option=value" or "script.option" -> why, and what to do instead
PENDING: dict[str, str] = {
    "model_type=chroma": "Chroma is not supported; train FLUX.1 dev or schnell (model_type = flux)",
}


def refusal(script: str, name: str, value: Any) -> str:
    """Why an option that differs from its default cannot be used in this script, or "" when it can."""
    for key in (name, f"{name}={value}", f"{script}.{name}", f"{script}.{name}={value}"):
        if reason := PENDING.get(key):
            return f"{name} does not work yet: {reason}"
    return ""
