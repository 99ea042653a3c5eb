"""Checks operators' objects against their CRDs' schemas: reads objects as YAML, writes one line for each fault.

It runs with the Python of tools.sh, whose packages are generated from the CRDs of the Prometheus operator and of
KEDA. Of LeaderWorkerSet none is to be had; its schema is schemas/LeaderWorkerSet.json. As the API server does with
strict validation, a field that a schema does not know is refused.
"""

import json
import pathlib
import sys

import jsonschema
import yaml
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus

FOLDER = pathlib.Path(__file__).parent / "schemas"
MODELS = {"ServiceMonitor": prometheus.ServiceMonitor, "PrometheusRule": prometheus.PrometheusRule,
          "ScaledObject": keda.ScaledObject}


def strict(schema):
    """The same schema, with no fields but those that it names."""
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            schema.setdefault("additionalProperties", False)
        for part in schema.values():
            strict(part)
    elif isinstance(schema, list):
        for part in schema:
            strict(part)
    return schema


def schema_of(kind):
    if kind in MODELS:
        return strict(MODELS[kind].model_json_schema(by_alias=True))
    return json.loads((FOLDER / f"{kind}.json").read_text(encoding="utf-8"))


def main():
    schemas = {}
    for document in yaml.safe_load_all(sys.stdin):
        kind = document["kind"]
        if kind not in schemas:
            schemas[kind] = jsonschema.Draft202012Validator(schema_of(kind))
        for error in schemas[kind].iter_errors(document):
            print(f"{kind} {document['metadata']['name']}: {error.json_path}: {error.message}")


if __name__ == "__main__":
    main()
