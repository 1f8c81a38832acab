"""Curate a folder of images: scan it, edit captions, find duplicates, and undo changes.

No torch. Originals are never lost: files that are changed or removed are first kept in `.trash/<date>/` inside the
folder (`trash.py`), and undoing a change skips files that were altered since.
"""
