"""Moves model weights memory to memory between inference replicas: the part that knows no engine.

What users and adapters may lean on, each module with its own `__all__`:

    mx_common.load          load weights out of another replica, and serve them
    mx_common.refit         carry a trainer's versions into a running engine
    mx_common.selection     order sources; register a policy of your own
    mx_common.simulate      what a policy does to a fleet; hold one of your own to figures
    mx_common.floor         judge and record a transfer
    mx_common.directory     client, server and store of the directory
    mx_common.transport     one-sided reads
    mx_common.identity      which weights are interchangeable
    mx_common.source_load   how busy a source is
    mx_common.topology      where a node is
    mx_common.engines       which versions of an engine an adapter takes
    mx_common.envs          every environment variable
    mx_common.errors        every error, in one tree

Modules and names that begin with an underscore may change at any time. Invariant: importing this package, or any module of it, reads no
environment, writes none, and starts nothing.
"""

__all__ = [
    "directory",
    "engines",
    "envs",
    "errors",
    "floor",
    "identity",
    "load",
    "refit",
    "selection",
    "simulate",
    "source_load",
    "topology",
    "transport",
]
