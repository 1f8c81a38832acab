"""A run as a folder of files: what a training records, and how other processes read, start and stop it.

`<output_dir>/runs/<run id>/` holds run.json (settings and state), progress.jsonl (events, one JSON object per line),
log.txt and run.toml. The trainer writes them; page, shell and tests only read. Waiting trainings are in the queue, also
a file, with its own worker process. Imports neither torch nor gradio, so that it loads quickly.
"""
