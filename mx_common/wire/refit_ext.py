"""Messages of `refit_ext.proto`: finding versions of weights, and leases renewed or revoked. Types are in `refit_ext.pyi`."""

from mx_common.wire._pool import file_namespace

globals().update(file_namespace("refit_ext.proto"))
