"""Commands for finished files: merge, extract, resize, convert, edit metadata.

Each module has one function of that name, which reads only safetensors, computes in float32 and writes a new file that
appears only when complete. It calls `report(what, done, total)` meanwhile. `shell.py` is `kohya tools`.
"""
