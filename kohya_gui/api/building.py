"""The API put together from its routes, with OpenAPI and one form for all mistakes."""

from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse

from kohya_gui.api import answers, config_routes, dataset_routes, event_routes, queue_routes, run_routes, sample_routes
from kohya_gui.api.app import PREFIX
from kohya_gui.api.docs_page import docs_html
from kohya_gui.api.words_page import words_html
from library.config.problems import ConfigError

ABOUT = (
    "Runs, queue, checks and data of this trainer. Times are seconds since 1970, durations are seconds, memory is in "
    "GiB, null is unknown. A page that other computers can reach wants its token: Authorization: Bearer TOKEN."
)


def build_api(roots: Sequence[Path], root_path: str = "") -> FastAPI:
    """Return the application. Only files below `roots` are read; a proxy shows the page under `root_path`."""
    api = FastAPI(
        title="Kohya Trainer",
        version="1",
        description=ABOUT,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{PREFIX}/openapi.json",
        servers=[{"url": root_path}] if root_path else None,
        responses=answers.REFUSALS,
    )
    # Before the queue's own routes, as "add" would be taken for an entry there.
    routers = (config_routes.router(roots), queue_routes.router(), run_routes.router(), dataset_routes.router(roots))
    for router in (*routers, sample_routes.sample_router(), event_routes.router()):
        api.include_router(router, prefix=PREFIX)

    @api.get(f"{PREFIX}/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(docs_html(api.openapi()))

    @api.get(f"{PREFIX}/words", include_in_schema=False)
    def words(language: str = "en") -> HTMLResponse:
        return HTMLResponse(words_html(language))

    api.add_exception_handler(ConfigError, answers.on_config_error)
    api.add_exception_handler(RequestValidationError, answers.on_invalid)
    api.add_exception_handler(HTTPException, answers.on_http_error)
    return api
