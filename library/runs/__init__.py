"""A run as a folder of files: what a training writes about itself, and how others read, start and stop it.

`<output_dir>/runs/<run id>/` holds run.json (what it is and how it stands), progress.jsonl (what happened, one JSON
object per line), log.txt and run.toml. The trainer writes them; the page, the shell and tests only read. No torch, no
gradio: this package must load in a blink.
"""
