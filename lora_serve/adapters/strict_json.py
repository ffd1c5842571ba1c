"""Parses JSON of untrusted files: one object, no key twice, or a finding.

Never raises for any bytes, and quotes none: the file may be of another kind, and its words not the
caller's to know. Knows nothing of what the object means.
"""

from __future__ import annotations

import json


def parse_object(data: bytes, what: str, findings: list[str]) -> dict[str, object] | None:
    """The JSON object in `data`, or None and a finding about `what`."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_object_without_duplicates)
    except UnicodeDecodeError as error:  # which quotes a byte
        findings.append(f"{what} is not valid JSON: byte {error.start} is no UTF-8")
        return None
    except (ValueError, RecursionError) as error:
        findings.append(f"{what} is not valid JSON: {error}")
        return None
    if not isinstance(value, dict):
        findings.append(f"{what} holds a {type(value).__name__}, not a JSON object")
        return None
    return value


def _object_without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen: dict[str, object] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError("a key stands there twice")
        seen[key] = value
    return seen
