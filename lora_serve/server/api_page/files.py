"""Which files the page at /docs is made of: ours, and Swagger UI, which a package carries."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

DOCS_PATH = "/docs"
OURS = f"{__package__}.static"
SWAGGER_UI = "fastapi_swagger.resources"


@dataclass(frozen=True, slots=True)
class PageFile:
    """package: the one that carries it."""

    path: str
    media_type: str
    package: str
    name: str

    def read(self) -> bytes:
        package, _, folder = self.package.rpartition(".")
        return (files(package) / folder / self.name).read_bytes()


PAGE_FILES = (
    PageFile(DOCS_PATH, "text/html", OURS, "docs.html"),
    PageFile(f"{DOCS_PATH}/docs.js", "text/javascript", OURS, "docs.js"),
    PageFile(f"{DOCS_PATH}/docs.css", "text/css", OURS, "docs.css"),
    PageFile(f"{DOCS_PATH}/swagger-ui.js", "text/javascript", SWAGGER_UI, "swagger-ui-bundle.js"),
    PageFile(f"{DOCS_PATH}/swagger-ui.css", "text/css", SWAGGER_UI, "swagger-ui.css"),
)
