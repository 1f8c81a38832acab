"""Answers of the API: models of dataclasses, sentences with their parts, and mistakes with their field."""

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from starlette.exceptions import HTTPException

from kohya_gui.server.json_api import refused
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Problem
from library.config.stored_messages import how_made
from library.runs import queue, reader

Model = TypeVar("Model", bound=BaseModel)
Sentence = Annotated[str, BeforeValidator(str)]  # a Message as English text
STATUS_OF_CODE = {queue.GONE: 404, queue.BUSY: 409, "too_many": 429, "allow": 403}
# Browsers log every other status as an error in the console, which a user's mistake must not cause.
WITHOUT_STATUS = "status=200"  # the value of the header Prefer


class Answer(BaseModel):
    """Common fields of all answers."""

    texts: list[dict[str, Any]] = Field(
        [], description="The templates and arguments of the sentences in this answer, for translations"
    )


class Said(Answer):
    """A sentence about the result."""

    said: Sentence = Field(description="What happened")


class OneProblem(BaseModel):
    """One mistake."""

    error: Sentence = Field(description="What is wrong, and what to do")
    field: str = Field("", description="The field or option that it is about")


class Failure(Answer):
    """Why a request was refused."""

    error: Sentence = Field(description="What is wrong, and what to do; a line for each mistake")
    field: str = Field("", description="The field or option of the first mistake")
    problems: list[OneProblem] = []
    next: str = Field("", description="The training that the queue starts if the request is repeated with sure")


class Body(BaseModel):
    """The body of a request: unknown fields are mistakes."""

    model_config = ConfigDict(extra="forbid")


class Nothing(Body):
    """No fields."""


def model_of(cls: type, name: str) -> type[BaseModel]:
    """Return the model of a dataclass of the library."""
    hints = typing.get_type_hints(cls)
    fields: dict[str, Any] = {field.name: (_shown_type(hints[field.name]), ...) for field in dataclasses.fields(cls)}
    return create_model(name, __doc__=cls.__doc__, **fields)


def _shown_type(hint: Any) -> Any:
    """Return the type of a value as JSON: messages are texts, tuples are lists, and dataclasses are models."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return model_of(hint, hint.__name__)
    inner = typing.get_args(hint)
    if Message in inner:
        return Sentence
    if typing.get_origin(hint) is tuple:
        return types.GenericAlias(list, (_shown_type(inner[0]),))
    if isinstance(hint, types.UnionType):
        return functools.reduce(operator.or_, map(_shown_type, inner))
    return hint


def answer(model: type[Model], **content: Any) -> Model:
    """Return an answer with these values, which may contain dataclasses and messages."""
    values = plain(content)
    return model.model_validate({**_with_text(values), "texts": [*how_made(values)]})


def plain(value: Any) -> Any:
    """Return values with dataclasses as mappings; messages stay."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _with_text(value: Any) -> Any:
    """Return plain values with messages replaced by their texts, also inside tables."""
    if isinstance(value, Mapping):
        return {name: _with_text(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_text(inner) for inner in value]
    return str(value) if isinstance(value, Message) else value


def failure(error: ConfigError) -> tuple[int, JsonObject]:
    """Return the status and the content of the answer to a mistake."""
    first = error.problems[0]
    problems = [{"error": str(problem), "field": problem.option} for problem in error.problems]
    return STATUS_OF_CODE.get(first.code, 422), {**refused(error), "field": first.option, "problems": problems}


def respond_failure(request: Request, status: int, content: JsonObject) -> JSONResponse:
    """Return the answer to a refused request."""
    is_page = request.headers.get("prefer") == WITHOUT_STATUS
    content = {"field": "", "problems": [], "next": "", "texts": [*how_made(content)], **content}
    return JSONResponse({**content, "error": str(content["error"])}, 200 if is_page else status)


def on_config_error(request: Request, error: Exception) -> JSONResponse:
    """Answer a user's mistake."""
    if not isinstance(error, ConfigError):
        raise error
    return respond_failure(request, *failure(error))


def on_invalid(request: Request, error: Exception) -> JSONResponse:
    """Answer a request that does not fit its model: the first mistake by its field, and all in `problems`."""
    if not isinstance(error, RequestValidationError):
        raise error
    problems = [
        {"error": f"{field}: {sentence}" if field else sentence, "field": field}
        for wrong in error.errors()
        for field in [".".join(str(part) for part in wrong["loc"][1:])]
        for sentence in [wrong["msg"].removeprefix("Value error, ")]
    ]
    is_json = all(wrong["type"] != "json_invalid" for wrong in error.errors())
    sentence = "\n".join(problem["error"] for problem in problems) if is_json else "The body is not JSON."
    content = {"error": sentence, "field": problems[0]["field"] if is_json else "", "problems": problems}
    return respond_failure(request, 422 if is_json else 400, content)


def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answer a request for an address or with a method that does not exist."""
    if not isinstance(error, HTTPException):
        raise error
    sentences = {
        400: "The body is not JSON.",
        404: "There is nothing here.",
        405: "This address does not take requests of this kind.",
    }
    return respond_failure(request, error.status_code, {"error": sentences.get(error.status_code, str(error.detail))})


def run_of_id(run_id: str) -> reader.RecordedRun:
    """Return a run, or raise the ConfigError that becomes 404."""
    try:
        return reader.find_run(run_id)
    except KeyError:
        raise ConfigError(Problem("", "There is no run called {name}.", name=run_id, code=queue.GONE)) from None


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Failure, "description": about}
    for status, about in {
        400: "The body is not JSON",
        401: "The token is missing or wrong",
        404: "There is no such run, entry or file",
        409: "The run or the queue is in another state",
        413: "The body is too large",
        415: "The body is not sent as JSON",
        422: "A mistake, as the sentence says",
    }.items()
}
