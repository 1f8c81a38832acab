"""Runs over HTTP: list, show, stop, save, sample, resume, compare, remove, and their sample images."""

import time
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field, create_model
from starlette.responses import Response

from kohya_gui.api import answers
from kohya_gui.api.answers import Answer, Body, Nothing, Said, answer, model_of
from kohya_gui.panel import samples
from library.config.problems import ConfigError, Message, Problem
from library.runs import deleting, explain, layout, overview, queue, queue_rows, reader, stop
from library.trainings import comparing, reopening

MAX_RUNS_SENT = 500
LOG_LINES = 60
Run: Any = model_of(overview.RunSummary, "Run")
ComparedOption: Any = model_of(comparing.ComparedOption, "ComparedOption")


class _RunList(Answer):
    """Runs, the newest first."""

    total: int = Field(description="How many there are in all")


class _RunDetails(Answer):
    """A run with its settings and files."""

    settings: dict[str, Any] = Field(description="Options that are not at their defaults")
    saved: list[str] = Field(description="Saved files and states that exist")
    samples: int = Field(description="How many sample images it has generated")
    can_resume: bool
    time_left: float | None
    log: str = Field(description="The last lines of its log")


RunList: Any = create_model("RunList", __base__=_RunList, __doc__=_RunList.__doc__, runs=(list[Run], ...))
RunDetails: Any = create_model("RunDetails", __base__=_RunDetails, __doc__=_RunDetails.__doc__, run=(Run, ...))
RunsCompared: Any = create_model(
    "RunsCompared",
    __base__=Answer,
    __doc__="Runs beside each other, and the options that are not the same in all; null is the default.",
    runs=(list[Run], ...),
    options=(list[ComparedOption], ...),
)


class StopRequest(Body):
    """How to stop a run."""

    how: Literal["after_step", "now", "kill"] = Field(
        "after_step", description="After its step; or early within it; or, of a run that hangs, at once without saving"
    )
    sure: bool = Field(False, description="Also if much work is lost, which is refused with 409 otherwise")
    pause_queue: bool = Field(False, description="Start nothing else then")


class StoppedRun(Said):
    """What happened, and what the queue starts next."""

    next: str = Field(description="The name of the training that the queue starts then")


class ResumedRun(Said):
    """The new run, or its entry in the queue."""

    run: str
    entry: str


class RemoveRequest(Body):
    """What to delete with a run."""

    files: bool = Field(False, description="Also the models, states and samples that it has written")
    sure: bool = Field(False, description="Delete them; without it, the answer is 409 and says what would be deleted")


class RemovedRun(Said):
    """What was deleted."""

    files: list[str]
    kept: list[str] = Field(description="Files that it has written and that stay")


class SampleImage(BaseModel):
    """A sample image; the place is its address below the run's samples."""

    place: int
    step: int
    number: int = Field(description="The number of its prompt, from 0")
    prompt: str


class SampleList(Answer):
    """The sample images of a run, the oldest first."""

    samples: list[SampleImage]


def router() -> APIRouter:
    """Return the routes of runs."""
    routes = APIRouter(prefix="/runs", tags=["runs"])

    @routes.get("", operation_id="list_runs", summary="List the runs", response_model=RunList)
    def list_runs(
        state: Annotated[
            Literal["starting", "running", "stopping", "finished", "stopped", "failed", "interrupted", ""],
            Query(description="Only those in this state"),
        ] = "",
        start: Annotated[int, Query(ge=0)] = 0,
        count: Annotated[int, Query(ge=1, le=MAX_RUNS_SENT)] = 100,
    ) -> Any:
        runs = [run for run in overview.overview() if state in ("", run.state)]
        return answer(RunList, runs=runs[start : start + count], total=len(runs))

    @routes.get("/compare", operation_id="compare_runs", summary="Compare runs", response_model=RunsCompared)
    def compare_runs(run: Annotated[list[str], Query(description="Two ids or more", max_length=12)]) -> Any:
        comparison = comparing.compare_runs([answers.run_of_id(run_id) for run_id in run])
        return answer(RunsCompared, runs=comparison.runs, options=comparison.options)

    @routes.get("/{run}", operation_id="show_run", summary="Show a run", response_model=RunDetails)
    def show_run(run: str) -> Any:
        return _details(answers.run_of_id(run))

    _add_actions(routes)
    _add_samples(routes)
    return routes


def _details(run: reader.RecordedRun) -> Any:
    summary, events = overview.summary(run), reader.progress(run.folder).update().events
    where = Path(str(run.facts.get("folder") or "."))
    saved = dict.fromkeys(where / str(event.get("file") or "") for event in events.get("saved", ()))
    return answer(
        RunDetails,
        run={**answers.plain(summary), "error": explain.cause(str(summary.error)) or summary.error},
        settings=queue_rows.run_values(run),
        saved=[str(path) for path in saved if path.exists()],
        samples=len(events.get("sample", ())),
        can_resume=queue.can_resume(run, reader.runs()),
        time_left=summary.time_left(time.time()),
        log=reader.tail(run.folder, LOG_LINES),
    )


def _add_actions(routes: APIRouter) -> None:
    @routes.post("/{run}/stop", operation_id="stop_run", summary="Stop a run", response_model=StoppedRun)
    def stop_run(run: str, body: StopRequest, request: Request) -> Any:
        found = answers.run_of_id(run)
        stop.refuse_ended(found)
        if body.how == "kill":
            stop.refuse_early_kill(found)
        if not body.sure and (question := stop.question_before(found, body.how)):
            return answers.respond_failure(request, 409, {"error": str(question), "field": "sure"})
        following = None if body.pause_queue else queue.starts_next(found)
        if body.pause_queue:
            queue.pause()
        stop.request(found.id, body.how)
        return answer(StoppedRun, said=stop.ANSWERS[body.how], next=following.name if following else "")

    @routes.post("/{run}/save", operation_id="save_run", summary="Save a file and a state", response_model=Said)
    def save_run(run: str, body: Nothing) -> Any:
        return _request_output(run, "save")

    @routes.post("/{run}/sample", operation_id="sample_run", summary="Generate samples", response_model=Said)
    def sample_run(run: str, body: Nothing) -> Any:
        return _request_output(run, "sample")

    @routes.post("/{run}/resume", operation_id="resume_run", summary="Resume a run", response_model=ResumedRun)
    def resume_run(run: str, body: Nothing) -> Any:
        resumed = reopening.resume_run(answers.run_of_id(run))
        return answer(ResumedRun, said=resumed.said, run=resumed.run, entry=resumed.entry)

    @routes.post("/{run}/remove", operation_id="remove_run", summary="Delete a run", response_model=RemovedRun)
    def remove_run(run: str, body: RemoveRequest, request: Request) -> Any:
        deletion = deleting.plan_deletion(answers.run_of_id(run), body.files)
        if not body.sure:
            return answers.respond_failure(request, 409, {"error": str(deletion.sentence()), "field": "sure"})
        deleting.delete_run(deletion)
        files, kept = map(str, deletion.files), map(str, deletion.kept)
        return answer(RemovedRun, said=Message("{run} is deleted.", run=run), files=[*files], kept=[*kept])


def _request_output(run_id: str, what: str) -> Any:
    run = answers.run_of_id(run_id)
    stop.refuse_ended(run)
    stop.request_output(run.id, what)
    return answer(Said, said=stop.ANSWERS[what])


def _add_samples(routes: APIRouter) -> None:
    address = "/{run}/samples"

    @routes.get(address, operation_id="list_samples", summary="List sample images", response_model=SampleList)
    def list_samples(run: str) -> Any:
        events = reader.progress(answers.run_of_id(run).folder).update().events.get("sample", ())
        found = [
            {
                "place": place,
                "step": _whole(event.get("step")),
                "number": _whole(event.get("number")),
                "prompt": str(event.get("prompt") or ""),
            }
            for place, event in enumerate(events)
        ]
        return answer(SampleList, samples=found)

    pictures: dict[str, Any] = {name: {} for name in ("image/png", "image/jpeg", "image/webp")}

    @routes.get(
        address + "/{place}",
        operation_id="show_sample",
        summary="A sample image",
        response_class=Response,
        responses={200: {"content": pictures, "description": "The image, or with small a JPEG of 192 pixels"}},
    )
    def show_sample(run: str, place: int, small: bool = False) -> Response:
        try:
            return samples.serve_sample({"run": run, "sample": str(place), "small": "1" if small else ""})
        except ConfigError as error:
            raise ConfigError(Problem("", str(error), code=queue.GONE)) from None


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, layout.NUMBER) else 0
