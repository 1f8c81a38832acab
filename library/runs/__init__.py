"""A run as a folder of files: what a training writes about itself, and how others read, start and stop it.

`<output_dir>/runs/<run id>/` holds run.json (what it is and how it stands), progress.jsonl (what happened, one JSON
object per line), log.txt and run.toml. The trainer writes them; the page, the shell and tests only read. What waits for
its turn is in the queue, a file as well, which a process of its own works off. It imports neither torch nor gradio, so
that it loads quickly.
"""
