"""Messages and enums of `refit.proto`: versions of trained weights and their shards. Types are in `refit.pyi`."""

from mx_common.wire._pool import file_namespace

globals().update(file_namespace("refit.proto"))
