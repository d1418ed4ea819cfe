"""Messages and enums of `p2p.proto`: the directory and the workers' control service. Types are in `p2p.pyi`."""

from mx_common.wire._pool import file_namespace

globals().update(file_namespace("p2p.proto"))
