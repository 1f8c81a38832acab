"""Commands for finished files: merge, extract, resize, convert, edit metadata.

Each module has one function of that name, which reads safetensors only, computes in float32 and writes a new file that
is there only when it is complete. `report(what, done, total)` is called on the way. `shell.py` is `kohya tools`.
"""
