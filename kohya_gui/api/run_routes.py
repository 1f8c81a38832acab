"""Runs over HTTP: list, show, stop, save, sample, resume, compare, measurements, notes, and remove."""

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field, create_model

from kohya_gui.api import answers
from kohya_gui.api.answers import Answer, Body, Nothing, Said, answer, model_of
from kohya_gui.api.run_changes import Run, RunChanges, shown_run
from library.config.problems import ConfigError, Message, MessageLike, Problem, join_messages
from library.runs import deleting, notes, overview, queue, queue_rows, reader, series, stop, unlisting
from library.trainings import comparing, reopening

MAX_RUNS_SENT = 10_000
MAX_UNLISTED = 500  # maximum runs per request
LOG_LINES = 60
ComparedOption: Any = model_of(comparing.ComparedOption, "ComparedOption")


class _RunList(Answer):
    """Runs, the newest first."""

    total: int = Field(description="How many there are in all, or how many of them have changed")
    mark: str = Field(description="To be sent as since, for what changes from now on")
    ids: list[str] | None = Field(description="The ids of all runs in their order, null if that has not changed")


class _RunDetails(Answer):
    """A run with its settings and files."""

    settings: dict[str, Any] = Field(description="Options that are not at their defaults")
    saved: list[str] = Field(description="Saved files and states that exist")
    samples: int = Field(description="How many sample images it has generated")
    can_resume: bool
    time_left: float | None = Field(description="As in run")
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
    ask_about_queue: bool = Field(False, description="Without sure, also 409 if the queue starts a training then")


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


class Series(Answer):
    """What a run has measured, as columns: all of it, or what a reader lacks."""

    name: str
    active: bool
    generation: int = Field(description="It changes when points that were sent are thinned or replaced")
    start: list[int] = Field(alias="from", description="The places of the first step and the first check sent here")
    steps: dict[str, Any] = Field(description="steps, seconds of training until each, and values by name")
    checks: dict[str, Any] = Field(description="The same for each validation")
    resumed: list[int] = Field(description="Steps after which the training was resumed")
    likeness: list[list[float]] = Field(description="Steps, and the likeness of their files to the images")


class NoteRequest(Body):
    """A note: plain text."""

    text: str
    before: str | None = Field(None, description="The note that it replaces; 409 if that has changed meanwhile")


class StoredNote(Answer):
    """A note as it is stored."""

    note: str


class RunIds(Body):
    """Several runs."""

    runs: list[str] = Field(max_length=MAX_UNLISTED)


def router() -> APIRouter:
    """Return the routes of runs."""
    routes, changes = APIRouter(prefix="/runs", tags=["runs"]), RunChanges()

    @routes.get("", operation_id="list_runs", summary="List the runs", response_model=RunList)
    def list_runs(
        state: Annotated[
            Literal["starting", "running", "stopping", "finished", "stopped", "failed", "interrupted", ""],
            Query(description="Only those in this state"),
        ] = "",
        start: Annotated[int, Query(ge=0)] = 0,
        count: Annotated[int, Query(ge=1, le=MAX_RUNS_SENT)] = 100,
        since: Annotated[str, Query(description="The mark of an answer: only what has changed after it")] = "",
    ) -> Any:
        now = time.time()
        changed, ids, mark = changes.since([shown_run(run, now) for run in overview.overview()], since)
        runs = [run for run in changed if state in ("", run["state"])]
        return answer(RunList, runs=runs[start : start + count], total=len(runs), mark=mark, ids=ids)

    @routes.get("/compare", operation_id="compare_runs", summary="Compare runs", response_model=RunsCompared)
    def compare_runs(run: Annotated[list[str], Query(description="Two ids or more", max_length=12)]) -> Any:
        comparison = comparing.compare_runs([answers.run_of_id(run_id) for run_id in run])
        runs = [shown_run(summary, time.time()) for summary in comparison.runs]
        return answer(RunsCompared, runs=runs, options=comparison.options)

    @routes.get("/{run}", operation_id="show_run", summary="Show a run", response_model=RunDetails)
    def show_run(run: str) -> Any:
        return _details(answers.run_of_id(run))

    _add_actions(routes)
    _add_removals(routes)
    _add_contents(routes)
    return routes


def _details(run: reader.RecordedRun) -> Any:
    shown, events = shown_run(overview.summary(run), time.time()), reader.progress(run.folder).update().events
    return answer(
        RunDetails,
        run=shown,
        settings=queue_rows.run_values(run),
        saved=[str(path) for path in reader.saved_files(run, events.get("saved", ()))],
        samples=len(events.get("sample", ())),
        can_resume=queue.can_resume(run, reader.runs()),
        time_left=shown["time_left"],
        log=reader.tail(run.folder, LOG_LINES),
    )


def _add_actions(routes: APIRouter) -> None:
    @routes.post("/{run}/stop", operation_id="stop_run", summary="Stop a run", response_model=StoppedRun)
    def stop_run(run: str, body: StopRequest, request: Request) -> Any:
        recorded = answers.run_of_id(run)
        stop.refuse_ended(recorded)
        if body.how == "kill":
            stop.refuse_early_kill(recorded)
        following = queue.starts_next(recorded)
        next_name = following.name if following else ""
        if not body.sure and (question := _question(recorded, body, next_name)):
            return answers.respond_failure(request, 409, {"error": question, "field": "sure", "next": next_name})
        then: MessageLike = Message("Then the queue starts {name}.", name=next_name) if next_name else ""
        if body.pause_queue:
            queue.pause()
            then, next_name = "The queue is paused: no new training starts.", ""
        stop.request(recorded.id, body.how)
        sentence = join_messages([stop.answer_to(recorded, body.how), *([then] if then else [])], " ")
        return answer(StoppedRun, said=sentence, next=next_name)

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


def _question(run: reader.RecordedRun, body: StopRequest, next_name: str) -> MessageLike:
    """Return the question before a run is stopped: about lost work, and on request about the queue's next start."""
    asked: list[MessageLike] = [question] if (question := stop.question_before(run, body.how)) else []
    if next_name and body.ask_about_queue and not body.pause_queue:
        asked.append(Message("When this run has stopped, the queue starts {name}.", name=next_name))
    return join_messages(asked, " ") if asked else ""


def _add_removals(routes: APIRouter) -> None:
    @routes.post("/{run}/remove", operation_id="remove_run", summary="Delete a run", response_model=RemovedRun)
    def remove_run(run: str, body: RemoveRequest, request: Request) -> Any:
        deletion = deleting.plan_deletion(answers.run_of_id(run), body.files)
        if not body.sure:
            return answers.respond_failure(request, 409, {"error": str(deletion.sentence()), "field": "sure"})
        deleting.delete_run(deletion)
        files, kept = map(str, deletion.files), map(str, deletion.kept)
        return answer(RemovedRun, said=Message("{run} is deleted.", run=run), files=[*files], kept=[*kept])

    @routes.post("/unlist", operation_id="unlist_runs", summary="Take ended runs off the list", response_model=Answer)
    def unlist_runs(body: RunIds) -> Any:
        for run in map(answers.run_of_id, body.runs):
            if run.active:  # before any is removed
                unlisting.refuse_active(run)
        for run_id in body.runs:
            unlisting.remove_run(run_id)
        return Answer()

    @routes.post("/relist", operation_id="relist_runs", summary="Put them back on the list", response_model=Answer)
    def relist_runs(body: RunIds) -> Any:
        for run_id in body.runs:
            unlisting.restore_run(run_id)
        return Answer()


def _request_output(run_id: str, what: str) -> Any:
    run = answers.run_of_id(run_id)
    stop.refuse_ended(run)
    stop.request_output(run.id, what)
    return answer(Said, said=stop.answer_to(run, what))


def _add_contents(routes: APIRouter) -> None:
    """Add the routes of a run's measurements and its note."""

    @routes.get("/{run}/series", operation_id="show_series", summary="What a run has measured", response_model=Series)
    def show_series(
        run: str,
        since: Annotated[
            str,
            Query(pattern=r"^(\d{1,9} \d{1,9} \d{1,9})?$", description="Its generation and the numbers got of each"),
        ] = "",
    ) -> Any:
        recorded = answers.run_of_id(run)
        generation, steps, checks = map(int, since.split() or (-1, 0, 0))
        measured = series.series_of(recorded.folder).update().since(generation, steps, checks)
        name, likeness = overview.summary(recorded).name, series.likeness_of_files(recorded.folder)
        return answer(Series, **measured, likeness=likeness, name=name, active=recorded.active)

    @routes.post(
        "/{run}/note", operation_id="note_run", summary="Store the note about a run", response_model=StoredNote
    )
    def note_run(run: str, body: NoteRequest) -> Any:
        folder = answers.run_of_id(run).folder
        now = notes.read_note(folder)
        if body.before is not None and now not in (body.before.strip(), body.text.strip()):
            template = "The note was changed in another window. It now says: {note}"
            raise ConfigError(Problem("", template, note=now, code=queue.BUSY))
        return answer(StoredNote, note=notes.write_note(folder, body.text))
