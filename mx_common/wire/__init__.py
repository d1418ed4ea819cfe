"""The ModelExpress 0.7 protocol, with this pack's extension fields, as message classes of a private descriptor pool.

    from mx_common.wire import p2p
    request = p2p.ListSourcesRequest(status_filter=p2p.SOURCE_STATUS_READY)

`p2p` is the directory and the workers' control service, `refit` the versions of trained weights, `refit_ext` what only this
pack's directory knows about them, `activity` the loads and refits that are under way; `rpc` makes client calls and server
handlers out of a service's descriptor; `identity` converts between `SourceIdentity` and `mx_common.identity`.
Invariant: importing this next to the package `modelexpress`, in either order, disturbs neither.
"""

from mx_common.wire import activity, p2p, refit, refit_ext
from mx_common.wire._pool import add_files

__all__ = ["activity", "add_files", "p2p", "refit", "refit_ext"]
