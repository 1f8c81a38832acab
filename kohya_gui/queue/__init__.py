"""The queue on the page: what waits, what runs, and what has run."""
