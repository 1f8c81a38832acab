"""Probes from the page: separate jobs, whose result is their progress."""

from library.check.isolated import environment
from library.config.formats import to_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.files import write_atomic
from library.jobs import job as jobs

KIND = "probe"
BEGUN = {"state": "running", "doing": "Preparing", "tries": [], "best": None}


def start(config: RunConfig, launch: JsonMapping) -> str:
    """Start a probe of a config, and return its id. Raises ConfigError while another one is running."""
    if any(job.active for job in jobs.every(KIND)):
        raise ConfigError("A probe is at work already: wait until it has ended, or stop it.")
    folder = jobs.new(KIND)
    toml = write_atomic(folder / "run.toml", to_toml(config))
    cpu = ["--cpu"] if launch.get("cpu") in (True, "true") else []
    words = [KIND, str(toml), "--script", config.script, *cpu]
    return jobs.start(KIND, words, folder, environment(launch)).id


def state(probe_id: str) -> JsonObject:
    """The progress of a probe, as library.bench.probe.Probe.as_json; `state` is "failed" when its process has ended."""
    job = jobs.find(probe_id)
    found = {**BEGUN, **job.result}
    if found["state"] == "running" and not job.active:
        last = "".join(job.log.strip().splitlines()[-1:]) if job.state == "interrupted" else ""
        return {**found, "state": "failed", "text": last or job.error or jobs.GONE}
    return found


def stop(probe_id: str) -> None:
    """Stop a probe and the processes that it has started."""
    jobs.stop(jobs.find(probe_id), at_once=True)
