"""What of a JSON schema xgrammar enforces: it passes over the rest without a word.

A schema is written anew with that alone, in one form: `$ref`s lead to `$defs` of its own, a list of
types is an `anyOf`, and what else may be in objects and arrays is said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.backend import refusal
from lora_serve.structured_output.xgrammar_regex import found_in

Schema = dict[str, object]

_ANNOTATIONS = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"}
    | {"example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"}
    | {"contentEncoding", "contentMediaType"}
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({*_BOUNDS, "multipleOf"}),
    "number": frozenset({*_BOUNDS, "multipleOf"}),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
    ),
}
_ALL_KEYWORDS = frozenset[str]().union(*_KEYWORDS.values())
_FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv6", "uuid", "uri"}
    | {"uri-reference", "uri-template"}
)
_MOST_MULTIPLE = 1024  # of which xgrammar makes an automaton
_MOST_INTEGER = 2**62
_MOST_DIGITS = 6  # behind the point of a number's bound; xgrammar rounds others
_MOST_NAMED = 5


def enforceable(text: str, *, is_lenient: bool) -> str:
    """The schema with what xgrammar enforces.

    is_lenient: leave out the rest.

    Raises:
        InvalidRequestError: it is no schema, or has a rest that may not be left out.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise refusal(f"the schema is not JSON: {error}") from error
    reduction = _Reduction(document)
    schema = reduction.run()
    if reduction.left_out and not is_lenient:
        names = ", ".join(list(dict.fromkeys(reduction.left_out))[:_MOST_NAMED])
        raise refusal(f"xgrammar does not enforce {names}", knows_other=True)
    return json.dumps(schema, ensure_ascii=False)


class _Reduction:
    """One schema on its way. left_out: the keywords that it loses."""

    def __init__(self, document: object) -> None:
        self._document = document
        self.left_out: list[str] = []
        self._names: dict[str, str] = {}  # of definitions, by the references to them

    def run(self) -> Schema | bool:
        schema = self._schema(self._document)
        definitions: dict[str, Schema | bool] = {}
        while len(definitions) < len(self._names):
            for reference, name in list(self._names.items())[len(definitions) :]:
                definitions[name] = self._schema(self._target(reference))
        return schema | {"$defs": definitions} if isinstance(schema, dict) else schema

    def _schema(self, schema: object) -> Schema | bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise refusal(f"a schema must be an object, not {json.dumps(schema)[:80]}")
        given = {
            key: value
            for key, value in schema.items()
            if key not in _ANNOTATIONS and not key.startswith("x-")
        }
        for key in ("$ref", "const", "enum", "anyOf", "oneOf", "allOf"):
            if key in given:
                return self._combined(key, given)
        return self._typed(given)

    def _combined(self, key: str, given: Schema) -> Schema | bool:
        """A schema with a keyword beside which xgrammar looks at no other."""
        value = given[key]
        others = given.keys() - {key, *({"type"} if key in ("const", "enum") else ())}
        self.left_out += [f"{other} beside {key}" for other in sorted(others)]
        match key:
            case "$ref":
                return {"$ref": f"#/$defs/{self._name(value)}"}
            case "const":
                return {"enum": _of_types([value], given.get("type"))}
            case "enum":
                return {"enum": _of_types(_as_list(key, value), given.get("type"))}
            case "allOf":
                if len(_as_list(key, value)) == 1:
                    return self._schema(_as_list(key, value)[0])
                self.left_out.append("allOf of several schemas")
                return True
        alternatives = _as_list(key, value)
        if key == "oneOf" and not self._exclude_one_another(alternatives):
            self.left_out.append("oneOf of schemas that one value may match together")
        return {"anyOf": [self._schema(each) for each in alternatives]}

    # ── references ──────────────────────────────────────────────────────────────────────────

    def _name(self, reference: object) -> str:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise refusal(f"$ref {json.dumps(reference)[:80]} does not begin with #")
        return self._names.setdefault(reference, f"d{len(self._names)}")

    def _target(self, reference: str) -> object:
        place = self._document
        for part in unquote(reference[1:]).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and part.isdecimal() and int(part) < len(place):
                place = place[int(part)]
            elif isinstance(place, dict) and part in place:
                place = place[part]
            else:
                raise refusal(f"$ref {reference[:80]} leads nowhere")
        if reference[1:2] not in ("", "/"):
            raise refusal(f"$ref {reference[:80]} leads nowhere; begin it with #/")
        return place

    # ── alternatives ────────────────────────────────────────────────────────────────────────

    def _exclude_one_another(self, alternatives: Sequence[object]) -> bool:
        """Whether no value can match two: by their types, or by a property that all must have."""
        schemas = [self._followed(each) for each in alternatives]
        types = [_json_type(each.get("type")) for each in schemas]
        if None not in types and len(set(types)) == len(types):
            return True
        if set(types) != {"object"}:
            return False
        tags = [_constant_properties(each) for each in schemas]
        shared = set(tags[0]).intersection(*tags[1:])
        return any(len({tag[name] for tag in tags}) == len(tags) for name in shared)

    def _followed(self, schema: object) -> Schema:
        seen = set()
        while isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            reference = schema["$ref"]
            if reference in seen or not reference.startswith("#"):
                return {}
            seen.add(reference)
            schema = self._target(reference)
        return schema if isinstance(schema, dict) else {}

    # ── types ───────────────────────────────────────────────────────────────────────────────

    def _typed(self, given: Schema) -> Schema:
        keywords = given.keys() - {"type"}
        unknown = sorted(keywords - _ALL_KEYWORDS)
        self.left_out += unknown
        keywords -= {*unknown}
        types = given.get("type", [])
        names = types if isinstance(types, list) else [types]
        if "type" not in given:
            fitting = [name for name, known in _KEYWORDS.items() if keywords <= known]
            names = fitting[-1:] if keywords else []
            if keywords and not names:
                self.left_out += [f"{key} without a type" for key in sorted(keywords)]
        for name in names:
            if not isinstance(name, str) or name not in _KEYWORDS:
                raise refusal(f"{json.dumps(name)[:80]} is no type of JSON schema")
        alternatives = [self._of_type(str(name), given) for name in names]
        return alternatives[0] if len(alternatives) == 1 else _any_of(alternatives)

    def _of_type(self, name: str, given: Schema) -> Schema:
        own = {key: value for key, value in given.items() if key in _KEYWORDS[name]}
        match name:
            case "string":
                rest = self._string(own)
            case "integer" | "number":
                rest = self._number(own, is_integer=name == "integer")
            case "array":
                rest = self._array(own)
            case "object":
                rest = self._object(own)
            case _:
                rest = {}
        return {"type": name, **rest}

    def _string(self, own: Schema) -> Schema:
        if "pattern" in own:
            try:
                pattern = found_in(str(own.pop("pattern")))
            except InvalidRequestError:
                self.left_out.append("a pattern with what it does not know")
                return self._string(own)
            self.left_out += [f"{key} beside pattern" for key in own]
            return {"pattern": pattern}
        if "format" in own:
            if own["format"] not in _FORMATS:
                self.left_out.append(f"format {json.dumps(own.pop('format'))[:40]}")
                return self._string(own)
            self.left_out += [f"{key} beside format" for key in own if key != "format"]
            return {"format": own["format"]}
        if own:  # as a pattern; xgrammar's own lengths let control characters through
            low, high = self._counts(own).get("minLength", 0), own.get("maxLength", "")
            return {"pattern": f".{{{low},{high}}}"}
        return {}

    def _number(self, own: Schema, *, is_integer: bool) -> Schema:
        bounds = {key: value for key, value in own.items() if key in _BOUNDS}
        for key, bound in bounds.items():
            if not _is_exact(bound, is_integer=is_integer):
                self.left_out.append(f"{key} {json.dumps(bound)[:40]}")
                del own[key]
        multiple = own.get("multipleOf")
        if "multipleOf" in own and not (
            is_integer and len(own) == 1 and isinstance(multiple, int) and _is_modest(multiple)
        ):
            self.left_out.append("multipleOf of this number")
            del own["multipleOf"]
        return own

    def _array(self, own: Schema) -> Schema:
        if own.pop("uniqueItems", False) is not False:
            self.left_out.append("uniqueItems")
        if isinstance(own.get("items"), list):
            self.left_out.append("items as a list (write prefixItems)")
            del own["items"]
        prefix = _as_list("prefixItems", own.pop("prefixItems", []))
        schema: Schema = {"items": self._schema(own.pop("items", True)), **self._counts(own)}
        return {"prefixItems": [self._schema(e) for e in prefix], **schema} if prefix else schema

    def _object(self, own: Schema) -> Schema:
        others = self._schema(own.pop("additionalProperties", True))
        given, required = own.pop("properties", {}), _as_list("required", own.pop("required", []))
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in required):
            raise refusal("properties must be an object, and required a list of strings")
        properties = {name: self._schema(each) for name, each in given.items()}
        for name in required:  # xgrammar looks for those in `properties` alone
            properties.setdefault(str(name), others)
        if others is not False and own.get("minProperties") not in (None, 0, 1):
            self.left_out.append("minProperties where further properties may repeat")
            del own["minProperties"]
        schema: Schema = {"additionalProperties": others, **self._counts(own)}
        if properties:
            schema = {"properties": properties, "required": required, **schema}
        return schema

    def _counts(self, own: Schema) -> Schema:
        """The keywords that bound a length, checked."""
        for key, value in own.items():
            if not _is_count(value):
                raise refusal(f"{key} must be a whole number, not {json.dumps(value)[:40]}")
        return own


def _any_of(alternatives: list[Schema]) -> Schema:
    return {"anyOf": list[object](alternatives)} if alternatives else {}


def _as_list(key: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise refusal(f"{key} must be a list, not {json.dumps(value)[:80]}")
    return value


def _json_type(value: object) -> str | None:
    """The type of a schema, by which it excludes others; None if it has none, or several."""
    return {"integer": "number"}.get(value, value) if isinstance(value, str) else None


def _constant_properties(schema: Schema) -> dict[str, str]:
    """The values of the properties that every object of a schema has, where each has only one."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    return {
        name: json.dumps(each["const"] if "const" in each else each["enum"][0])
        for name, each in properties.items()
        if name in required
        and isinstance(each, dict)
        and ("const" in each or (isinstance(each.get("enum"), list) and len(each["enum"]) == 1))
    }


def _of_types(values: Sequence[object], types: object) -> list[object]:
    """The values that are of one of these types."""
    names = types if isinstance(types, list) else [types]
    kept = [value for value in values if types is None or _is_of_types(value, names)]
    if not kept:
        raise refusal("no value of const or enum is of the schema's type")
    return kept


def _is_of_types(value: object, names: Sequence[object]) -> bool:
    match value:
        case None:
            return "null" in names
        case bool():
            return "boolean" in names
        case int():
            return "integer" in names or "number" in names
        case float():
            return "number" in names or ("integer" in names and value.is_integer())
        case str():
            return "string" in names
        case list():
            return "array" in names
    return "object" in names


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_modest(multiple: int) -> bool:
    return not isinstance(multiple, bool) and 0 < multiple <= _MOST_MULTIPLE


def _is_exact(bound: object, *, is_integer: bool) -> bool:
    """Whether xgrammar holds numbers to this very bound."""
    if isinstance(bound, bool) or not isinstance(bound, (int, float)):
        return False
    if is_integer:
        return isinstance(bound, int) and abs(bound) < _MOST_INTEGER
    return abs(bound) < 10**_MOST_DIGITS and round(bound, _MOST_DIGITS) == bound
