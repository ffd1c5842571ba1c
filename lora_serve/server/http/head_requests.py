"""HEAD on every route that GET has: probes ask by it, and uvicorn sends the head alone."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.routing import Route


def answering_head(router: APIRouter) -> APIRouter:
    """The router, whose routes are all there, with HEAD."""
    for route in router.routes:
        if isinstance(route, Route) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")
    return router
