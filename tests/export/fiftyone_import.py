"""Import an export by FiftyOne's own importer, with mongomock in place of MongoDB.

python fiftyone_import.py EXPORT    print the samples as JSON
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["FIFTYONE_DO_NOT_TRACK"] = "true"

import mongoengine
import mongomock

client = mongomock.MongoClient()


def connect(config: Any) -> None:
    """What `establish_db_conn` does, without a server."""
    database._client = client
    mongoengine.connect(config.database_name, mongo_client_class=mongomock.MongoClient)
    mongoengine.connection._connections["default"] = client


import fiftyone.core.odm.database as database  # noqa: E402 - FIFTYONE_DO_NOT_TRACK is set before

database.establish_db_conn = connect

import fiftyone as fo  # noqa: E402

dataset = fo.Dataset.from_dir(sys.argv[1], fo.types.FiftyOneDataset, progress=False)
schema = {name: type(field).__name__ for name, field in dataset.get_field_schema().items()}
samples = []
for sample in dataset:
    values = {}
    for name in schema:
        value = sample[name]
        if isinstance(value, fo.Classification):
            value = {"label": value.label, "confidence": value.confidence}
        elif hasattr(value, "tolist"):
            value = {"dtype": value.dtype.name, "values": value.tolist()}
        values[name] = value
    samples.append(values)
tags = dataset.count_sample_tags()
found = {"schema": schema, "samples": samples, "tags": tags, "classes": dataset.default_classes}
sys.stdout.write(json.dumps(found, default=str))
