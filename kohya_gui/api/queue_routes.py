"""The queue over HTTP: waiting, active and ended entries; every change returns the resulting queue."""

from typing import Annotated, Any, Self

from fastapi import APIRouter
from pydantic import BaseModel, Field, create_model, model_validator

from kohya_gui.api.answers import Answer, Body, Nothing, Sentence, answer, model_of
from kohya_gui.form import gpus
from library.config.json_types import JsonObject
from library.config.problems import Message
from library.runs import queue
from library.runs.queue_rows import QueueRow, queue_rows

Entry: Any = model_of(QueueRow, "QueueEntry")


class GpuState(BaseModel):
    """A GPU that trainings on this computer may use, with its memory in GiB."""

    index: str
    name: str
    free: float
    total: float
    user: str = Field(description="The name of what uses it, empty if nothing does")


class _Queue(Answer):
    """The queue: active entries, waiting ones in their order, and ended ones, the newest first."""

    waiting: int = Field(description="How many entries wait")
    paused: Sentence = Field(description="Why nothing new is started, empty if the queue is not paused")
    halted: bool = Field(description="Whether it waits for Continue, as the computer or its process has ended")
    go_on: bool = Field(description="Whether it continues when a training fails")
    can_restore: list[str] = Field(description="Ids of removed entries that can be restored, the last one last")
    gpus: list[GpuState]
    said: Sentence = Field("", description="What a change has done")
    entry: str = Field("", description="The id of the entry that a change has added")


Queue: Any = create_model("Queue", __base__=_Queue, __doc__=_Queue.__doc__, entries=(list[Entry], ...))


class Move(Body):
    """Where to move an entry: one of the two fields."""

    to: Annotated[int | None, Field(ge=1, le=queue.MAX_WAITING)] = Field(
        None, description="Its place among those that wait, 1 for the next"
    )
    by: Annotated[int | None, Field(ge=-queue.MAX_WAITING, le=queue.MAX_WAITING)] = Field(
        None, description="By how many places: -1 is sooner, 1 later"
    )

    @model_validator(mode="after")
    def has_one(self) -> Self:
        """Refuse neither and both."""
        if (self.to is None) == (self.by is None):
            raise ValueError("write either to or by")
        return self


class GoOn(Body):
    """Whether the queue continues when a training fails."""

    go_on: bool


def show_queue(said: Any = "", entry: str = "") -> Any:
    """Return the queue as it is now."""
    now = queue.read_queue()
    return answer(
        Queue,
        entries=queue_rows(now),
        waiting=len(now.waiting),
        paused=now.paused,
        halted=now.halted,
        go_on=now.go_on,
        can_restore=[removed.id for removed in now.removed],
        gpus=gpus.list_gpus(),
        said=said,
        entry=entry,
    )


def router() -> APIRouter:
    """Return the routes of the queue."""
    routes = APIRouter(prefix="/queue", tags=["queue"])
    shown: JsonObject = {"response_model": Queue}

    @routes.get("", operation_id="list_queue", summary="List the queue", **shown)
    def list_queue() -> Any:
        return show_queue()

    @routes.post("/pause", operation_id="pause_queue", summary="Start nothing new", **shown)
    def pause(body: Nothing) -> Any:
        queue.pause()
        return show_queue("The queue is paused: no new training starts.")

    @routes.post("/resume", operation_id="resume_queue", summary="Continue after a pause or a restart", **shown)
    def resume(body: Nothing) -> Any:
        queue.go_on()
        return show_queue("The queue continues.")

    @routes.post("/clear", operation_id="clear_queue", summary="Take all ended entries off the list", **shown)
    def clear(body: Nothing) -> Any:
        queue.clear()
        return show_queue("Ended trainings are off the list. Their runs stay.")

    @routes.post("/after-failure", operation_id="set_after_failure", summary="Continue or pause on failures", **shown)
    def after_failure(body: GoOn) -> Any:
        queue.after_failure(body.go_on)
        return show_queue()

    _add_entry_routes(routes, shown)
    return routes


def _add_entry_routes(routes: APIRouter, shown: JsonObject) -> None:
    """Add the routes of one entry."""

    @routes.post("/{entry}/move", operation_id="move_entry", summary="Move a waiting entry", **shown)
    def move(entry: str, body: Move) -> Any:
        if body.to is not None:
            queue.move_to(entry, body.to - 1)
        else:
            queue.move(entry, body.by or 0)
        now = queue.read_queue()
        place = next((at for at, waiting in enumerate(now.waiting, 1) if waiting.id == entry), 0)
        template = "{name} is number {place} of {count} waiting."
        return show_queue(Message(template, name=now.find(entry).name, place=place, count=len(now.waiting)))

    @routes.post("/{entry}/remove", operation_id="remove_entry", summary="Remove an entry; its run continues", **shown)
    def remove(entry: str, body: Nothing) -> Any:
        queue.refuse_active(queue.read_queue().find(entry))
        return show_queue(Message("{name} is removed from the queue.", name=queue.remove_entry(entry).name))

    @routes.post("/{entry}/restore", operation_id="restore_entry", summary="Put a removed entry back", **shown)
    def restore(entry: str, body: Nothing) -> Any:
        return show_queue(Message("{name} is back in the queue.", name=queue.restore(entry).name), entry)

    @routes.post("/{entry}/duplicate", operation_id="duplicate_entry", summary="Add a copy with its own name", **shown)
    def duplicate(entry: str, body: Nothing) -> Any:
        double = queue.duplicate(entry)
        message = Message("{name} is in the queue: a copy with a new name.", name=double.name)
        return show_queue(message, double.id)
