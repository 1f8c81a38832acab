"""HTTP for scripts and for the page itself, under /api/v1: typed requests and answers, described by OpenAPI."""
