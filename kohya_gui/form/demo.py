"""Try a form with the demo: a small model, images of its own, and the config that trains on them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kohya_gui.form.form import SettingsForm
from kohya_gui.form.requested import requested_family
from kohya_gui.server import paths
from kohya_gui.server.json_api import ApiRequest, Handler
from kohya_gui.tools.commands import refuse_second
from library.config.json_types import JsonObject
from library.config.problems import ConfigError
from library.jobs import jobs

DEMO_KIND = "demo"
DEMO_FOLDER = ("kohya", "demo")  # below the first root


class DemoApi:
    """Handlers of requests from the page's scripts."""

    def __init__(self, forms: Mapping[str, SettingsForm], roots: Sequence[Path]) -> None:
        self.forms, self.roots = forms, roots

    @property
    def handlers(self) -> dict[str, Handler]:
        return {"demo": self.begin, "demo_state": self.state}

    def begin(self, request: ApiRequest) -> JsonObject:
        """Create the demo's model and images for a tab and a family, in a separate process."""
        script = self._script(request)
        folder = paths.allowed_path(str(self.roots[0].joinpath(*DEMO_FOLDER)), self.roots, "folder")
        refuse_second(DEMO_KIND)
        family = request.text("family")
        job = jobs.start_job(DEMO_KIND, ["demo", "--no-train", f"--family={family}", f"--out={folder}"])
        return {"id": job.id, "script": script}

    def state(self, request: ApiRequest) -> JsonObject:
        """Return the progress, and finally the path of the config."""
        job, script = jobs.find_job(request.text("id")), self._script(request)
        if job.active:
            return {"state": "running"}
        if job.state != "finished":
            raise ConfigError("The demo could not be made: {why}", why=job.error or job.log.strip() or job.state)
        path = paths.readable(job.result.get("configs", {}).get(script), self.roots)
        return {"state": "finished", "path": str(path)}

    def _script(self, request: ApiRequest) -> str:
        form, family = requested_family(self.forms, request)
        return str(form.configs[family].script)
