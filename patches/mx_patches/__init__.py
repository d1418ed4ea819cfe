"""What a framework has no hook for: one file a patch, each with version range, reason and upstream reference.

Applied by name through `mx_common.patching`, never by importing. Invariant: importing this package changes nothing.
"""
