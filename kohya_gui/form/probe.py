"""Probes from the page: separate jobs, whose result is their progress."""

from library.check.isolated import environment_for_check
from library.config.formats import to_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.files import write_atomic
from library.jobs import job as jobs

PROBE_KIND = "probe"
BEGUN = {"state": "running", "doing": "Preparing", "tries": [], "best": None}


def start_probe(config: RunConfig, launch: JsonMapping) -> str:
    """Start a probe of a config, and return its id. Raises ConfigError while another one is running."""
    if any(job.active for job in jobs.jobs_of_kinds(PROBE_KIND)):
        raise ConfigError("A probe is at work already: wait until it has ended, or stop it.")
    folder = jobs.new(PROBE_KIND)
    toml = write_atomic(folder / "run.toml", to_toml(config))
    cpu = ["--cpu"] if launch.get("cpu") in (True, "true") else []
    words = [PROBE_KIND, str(toml), "--script", config.script, *cpu]
    return jobs.start_job(PROBE_KIND, words, folder, environment_for_check(launch)).id


def probe_state(probe_id: str) -> JsonObject:
    """The progress of a probe, as library.bench.probe.Probe.as_json; `state` is "failed" when its process has ended."""
    job = jobs.find_job(probe_id)
    progress = {**BEGUN, **job.result}
    if progress["state"] == "running" and not job.active:
        last = "".join(job.log.strip().splitlines()[-1:]) if job.state == "interrupted" else ""
        return {**progress, "state": "failed", "text": last or job.error or jobs.GONE}
    return progress


def stop_probe(probe_id: str) -> None:
    jobs.stop_job(jobs.find_job(probe_id), at_once=True)
