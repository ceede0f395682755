"""Files and folders that are complete or absent, claimed by one writer at a time, and checked when they are read."""

from tensigma.files.claims import claimed
from tensigma.files.partials import recover, sweep
from tensigma.files.schema import (
    SEAL,
    Check,
    anything,
    check_seal,
    flag,
    integer,
    mapping,
    number,
    optional,
    parse_json,
    read_json,
    record,
    seal,
    sequence,
    text,
    unique,
)
from tensigma.files.whole import whole_file, whole_folder

__all__ = [
    "SEAL",
    "Check",
    "anything",
    "check_seal",
    "claimed",
    "flag",
    "integer",
    "mapping",
    "number",
    "optional",
    "parse_json",
    "read_json",
    "record",
    "recover",
    "seal",
    "sequence",
    "sweep",
    "text",
    "unique",
    "whole_file",
    "whole_folder",
]
