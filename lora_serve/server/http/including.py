"""How an application takes in a router, beyond what FastAPI does."""

from __future__ import annotations

import re

from fastapi import APIRouter, FastAPI
from starlette.routing import Route


def include_router(app: FastAPI, router: APIRouter) -> None:
    """Serve the routes of a router, which are all there. Other applications may share them."""
    for route in router.routes:
        assert isinstance(route, Route), "a router has routes of HTTP alone"
        _answer_head(route)
        _match_whole_paths(route)
    app.router.routes += router.routes  # FastAPI's own way would compile their paths again


def _answer_head(route: Route) -> None:
    """HEAD where GET is: probes ask by it, and uvicorn sends the head alone."""
    if route.methods and "GET" in route.methods:
        route.methods.add("HEAD")


def _match_whole_paths(route: Route) -> None:
    """Match a path as a whole, whatever characters it has.

    Starlette takes `/health` and a line break for `/health`, where no middleware does, and a path
    with a line break in it for none that has a name.
    """
    pattern = route.path_regex.pattern.removesuffix("$").removesuffix(r"\Z")
    route.path_regex = re.compile(rf"{pattern}\Z", re.DOTALL)
