"""The check that the page asks for: `python -m library.check`."""

from library.imports import without_collecting

with without_collecting():
    from library.check.report import asked

if __name__ == "__main__":
    asked()
