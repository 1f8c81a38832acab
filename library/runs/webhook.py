"""Notify the user's webhook that a run has ended or the queue waits: JSON without images or paths.

The address may contain a key, so it is stored in a private file, and never in a config, record, log or bundle. A
message must not harm a training: each call returns within seconds and raises nothing.
"""

import json
import logging
import math
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO

from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, MessageLike
from library.runs import keys, redaction

TIMEOUT = 5.0  # seconds to connect, and to wait for each part of the answer
MAX_WAIT = 8.0  # seconds in total
MAX_LENGTH = 2000  # maximum characters of an address
MAX_WHY = 500  # maximum characters of the cause of a failure
SENT_FILE = "told"  # file in a run's folder: the notification was sent
ENDED = ("finished", "stopped", "failed", "interrupted")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which could lead into this computer's network."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def store_address(text: str) -> None:
    """Store the address of a webhook, or delete it with "". Raises ConfigError if it is invalid."""
    keys.store_privately(keys.webhook_file(), {"address": checked_address(text) if text.strip() else ""})


def checked_address(text: str) -> str:
    """Return an address without surrounding spaces. Raises ConfigError unless it is one of http or https."""
    address = text.strip()
    try:
        parts = urllib.parse.urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
        parts = urllib.parse.urlsplit("")
    if parts.scheme not in ("http", "https") or not host or len(address) > MAX_LENGTH:
        raise ConfigError("A webhook is an address that starts with https:// or http://, such as that of a channel.")
    if parts.username is not None or not address.isprintable() or " " in address:
        raise ConfigError("The address of a webhook contains neither a name before @ nor spaces.")
    return address


def shown_address(address: str) -> str:
    """Return the part of an address that is no secret: its host."""
    parts = urllib.parse.urlsplit(address)
    return f"{parts.scheme}://{parts.hostname}/…" if address else ""


def tell_end(folder: Path, facts: Mapping[str, object]) -> None:
    """Send once that the run in this folder has ended. Never raises."""
    address, state = keys.stored_webhook(), str(facts.get("state"))
    if not address or state not in ENDED:
        return
    try:
        (folder / SENT_FILE).open("x").close()  # trainer and queue may both notice it
    except OSError:
        return
    send_quietly(address, end_of_run(facts))


def tell_waiting(name: str, why: MessageLike) -> None:
    """Send that the queue waits for its user. Never raises."""
    if address := keys.stored_webhook():
        text = Message("The queue is paused before {name}. {why}", name=name, why=why)
        send_quietly(address, _event("waiting", text, {"name": name, "error": without_paths(why)}))


def end_of_run(facts: Mapping[str, object]) -> JsonObject:
    """Return the JSON about a run that has ended."""
    state, name = str(facts.get("state")), str(facts.get("output_name") or facts.get("id") or "")
    step, total, why = facts.get("step"), facts.get("total_steps"), without_paths(facts.get("error") or "")
    started, ended, latest = facts.get("started"), facts.get("ended"), facts.get("latest")
    # no duration if the clock was set back
    timed = isinstance(started, int | float) and isinstance(ended, int | float) and ended >= started
    loss = latest.get("avr_loss") if isinstance(latest, Mapping) else None
    words = {
        "finished": "{name} has finished, after step {step} of {total}.",
        "stopped": "{name} was stopped after step {step} of {total}.",
        "failed": "{name} has failed after step {step} of {total}.",
        "interrupted": "{name} was interrupted after step {step} of {total}.",
    }
    text = Message(words[state], name=name, step=step or 0, total=total or "?")
    details = {"run": facts.get("id"), "name": name, "title": facts.get("title"), "steps_done": step}
    details |= {"steps_total": total, "loss": loss if isinstance(loss, int | float) else None, "error": why}
    details["seconds"] = round(ended - started, 1) if timed else None  # type: ignore[operator]
    return _event(state, text, details)


def _event(kind: str, text: Message, details: JsonObject) -> JsonObject:
    sentence = f"{text} {details['error']}".strip() if kind != "waiting" else without_paths(text)
    # The loss of a failed run may be NaN, which is not JSON: receivers would refuse the whole message.
    details = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in details.items()}
    # Slack, Mattermost and others show `text`, Discord `content`.
    return {"event": kind, "time": round(time.time(), 3), **details, "text": sentence, "content": sentence}


def without_paths(text: object) -> str:
    """Return a text without paths, cut to the length limit of a message."""
    lines = [redaction.TOKENS.sub("<token>", line) for line in str(text).splitlines()]
    cut = [f"{line[: match.start()]}<path>" if (match := redaction.PATH.search(line)) else line for line in lines]
    return " ".join(cut)[:MAX_WHY]


def send_quietly(address: str, event: JsonObject) -> None:
    """Send an event and wait at most MAX_WAIT, as a response may arrive byte by byte; only log problems."""

    def try_to_send() -> None:
        try:
            send(address, event)
        except ConfigError as error:
            logging.getLogger(__name__).warning("%s", error)

    sender = threading.Thread(target=try_to_send, name="webhook", daemon=True)
    sender.start()
    sender.join(MAX_WAIT)


def send(address: str, event: JsonObject) -> None:
    """Send an event. Raises ConfigError if the address does not accept it; the message does not contain the address."""
    request = urllib.request.Request(
        address,
        data=json.dumps(event).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "kohya-trainer"},
        method="POST",
    )
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT):
            return
    except urllib.error.HTTPError as error:
        error.close()
        if 300 <= error.code < 400:
            raise ConfigError(
                "The webhook at {host} redirects elsewhere, which is not followed: enter the final address.",
                host=shown_address(address),
            ) from None
        raise ConfigError(
            "The webhook at {host} answered with status {status}.", host=shown_address(address), status=error.code
        ) from None
    except (OSError, HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or type(error).__name__
        raise ConfigError(
            "The webhook at {host} does not answer ({why}).", host=shown_address(address), why=str(why)[:200]
        ) from None


def trial_event() -> JsonObject:
    return _event("test", Message("This is a test of the webhook."), {"error": ""})
