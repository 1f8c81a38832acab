"""The check of a form, started by the page: `python -m library.check`."""

from library.imports import without_collecting

with without_collecting():
    from library.check.answering import answer_requests

if __name__ == "__main__":
    answer_requests()
