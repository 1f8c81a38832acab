"""The sample images of a run over HTTP."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from kohya_gui.api import answers
from kohya_gui.api.answers import Answer, answer
from kohya_gui.panel import resumed_samples, samples
from library.config.problems import ConfigError, Problem
from library.runs import layout, queue


class SampleImage(BaseModel):
    """A sample image; the place is its address below the samples of its run."""

    run: str
    place: int
    step: int
    number: int = Field(description="The number of its prompt, from 0")
    prompt: str
    made: float = Field(description="When, 0 if unknown")


class SampleList(Answer):
    """The sample images of a run that are still there, the oldest first."""

    samples: list[SampleImage]


def sample_router() -> APIRouter:
    """Return the routes of sample images."""
    routes, address = APIRouter(prefix="/runs", tags=["runs"]), "/{run}/samples"

    @routes.get(address, operation_id="list_samples", summary="List sample images", response_model=SampleList)
    def list_samples(
        run: str, resumed: Annotated[bool, Query(description="After those of the runs that it continues")] = False
    ) -> Any:
        recorded = answers.run_of_id(run)
        listed = resumed_samples.with_resumed(recorded) if resumed else resumed_samples.own_samples(recorded)
        return answer(SampleList, samples=[_described(sample) for sample in listed if sample.exists])

    images: dict[str, Any] = {name: {} for name in ("image/png", "image/jpeg", "image/webp")}

    @routes.get(
        address + "/{place}",
        operation_id="show_sample",
        summary="A sample image by its place, or the first prompt's image at the newest step",
        response_class=Response,
        responses={
            200: {"content": images, "description": "The image, or with small a JPEG of 192 pixels"},
            204: {"description": "With or_nothing: it is not there, such as after its file was deleted"},
        },
    )
    def show_sample(
        run: str,
        place: int | Literal["newest"],
        small: bool = False,
        or_nothing: Annotated[bool, Query(description="204 instead of 404 where there is no image")] = False,
    ) -> Response:
        try:
            return samples.serve_sample(run, place, small)
        except ConfigError as error:
            if or_nothing:  # browsers log a 404 as an error
                return Response(status_code=204)
            raise ConfigError(Problem("", str(error), code=queue.GONE)) from None

    return routes


def _described(sample: resumed_samples.RunSample) -> dict[str, Any]:
    event = sample.event
    return {
        "run": sample.run.id,
        "place": sample.place,
        "step": sample.step,
        "number": _whole(event.get("number")),
        "prompt": str(event.get("prompt") or ""),
        "made": event["t"] if isinstance(event.get("t"), layout.NUMBER) else 0.0,
    }


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, layout.NUMBER) else 0
