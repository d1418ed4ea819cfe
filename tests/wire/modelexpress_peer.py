"""One process with this pack and the real `modelexpress`, imported in the order given; prints what each saw of the other.

Run by `test_wire_compat.py` with a PYTHONPATH that decides which protobuf is in use.
"""

from __future__ import annotations

import json
import sys


def import_ours():
    import mx_common.directory

    return mx_common.directory


def import_theirs():
    import modelexpress.client
    import modelexpress.metadata.worker_server

    return modelexpress


def main(order):
    if order == "ours-first":
        directory, modelexpress = import_ours(), import_theirs()
    else:
        modelexpress, directory = import_theirs(), import_ours()
    import google.protobuf
    from modelexpress import p2p_pb2 as theirs

    from mx_common.identity import Identity
    from mx_common.wire import p2p

    seen = {"protobuf": google.protobuf.__version__, "same_class": theirs.SourceIdentity is p2p.SourceIdentity}
    with directory.DirectoryServer("127.0.0.1:0") as server, directory.DirectoryClient(server.address) as ours:
        client = modelexpress.client.MxClient(server_url=server.address)
        identity = theirs.SourceIdentity(
            mx_version="0.7.0", model_name="Org/Model", tensor_parallel_size=1, pipeline_parallel_size=1
        )
        worker = theirs.WorkerMetadata(worker_rank=3, accelerator="cpu", nixl_metadata=b"agent", topology={"host": "a"})
        worker.tensor_source.tensors.add(name="w", addr=1 << 40, size=8, dtype="bfloat16")
        source_id = client.publish_metadata(identity, worker, "their-worker")
        client.update_status(source_id, "their-worker", 3, theirs.SOURCE_STATUS_READY, source_load=0.0)
        seen["same_source_id"] = source_id == ours.list_sources(Identity(model_name="Org/Model")).instances[0].mx_source_id
        found = ours.get_metadata(source_id, "their-worker")
        seen["ours_reads_theirs"] = [
            found.worker.tensor_source.tensors[0].addr,
            found.worker.nixl_metadata.decode(),
            found.worker.worker_rank,
        ]
        ref = ours.list_sources(status=p2p.SOURCE_STATUS_READY).instances[0]
        seen["measured_zero_load"] = [ref.HasField("source_load"), ref.source_load]

        ours.publish(Identity(model_name="Org/Model"), p2p.WorkerMetadata(worker_rank=1), "our-worker")
        ours.update_status(source_id, "our-worker", 1, p2p.SOURCE_STATUS_READY, reads_in_flight=2)
        listed = client.list_sources(identity, status_filter=theirs.SOURCE_STATUS_READY)
        seen["theirs_lists"] = sorted(i.worker_id for i in listed.instances)
        seen["theirs_reads_ours"] = client.get_metadata(source_id, "our-worker").worker.worker_rank
        client.close()
    seen.update(worker_service(directory, modelexpress, source_id, theirs, p2p))
    print(json.dumps(seen))


def worker_service(directory, modelexpress, source_id, theirs, p2p):
    peer = modelexpress.metadata.worker_server
    seen = {}
    server = peer.WorkerGrpcServer([theirs.TensorDescriptor(name="w", size=8)], source_id, worker_id="their-worker")
    port = server.start()
    with (
        directory.WorkerClient(f"127.0.0.1:{port}", source_id, "their-worker") as reader,
        directory.LeaseKeeper(reader) as lease,
    ):
        first = lease.lease_id
        seen["our_reader_their_source"] = [t.name for t in lease.manifest.tensors]
        renewed = reader.renew(first)
        seen["renewal_with_their_source_is_a_new_lease"] = renewed != first
        reader.release(renewed)
    server.drain_tensor_reads(5.0)
    server.stop(0)

    leases = directory.Leases(1)
    manifest = p2p.GetTensorManifestResponse(tensors=[p2p.TensorDescriptor(name="w", size=8, digest=7)])
    with directory.WorkerServer(lambda: manifest, leases, "our-worker", mx_source_id=source_id) as ours:
        lease, _ = peer.prepare_tensor_read(ours.endpoint, source_id, worker_id="our-worker")
        seen["their_reader_our_source"] = [[t.name for t in lease.manifest.tensors], leases.open_count()]
        lease.close()
        seen["open_after_their_release"] = leases.open_count()
    return seen


if __name__ == "__main__":
    main(sys.argv[1])
