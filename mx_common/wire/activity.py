"""Messages of `activity.proto`: loads and refits that are under way. Types are in `activity.pyi`."""

from mx_common.wire._pool import file_namespace

globals().update(file_namespace("activity.proto"))
