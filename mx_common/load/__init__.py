"""Loads a replica's weights out of another replica's memory, for any engine.

    loaded = load(job, engine, log)
    source = Source.start(job, loaded, ready=..., serving=..., log=log)

An adapter implements `EngineModel` and fills a `Job`; everything that can go wrong between them is handled here.
"""

from mx_common.load.digest import tensor_digest
from mx_common.load.engine import EngineModel, Job
from mx_common.load.loader import Loaded, load
from mx_common.load.settings import Settings
from mx_common.load.source import Source
from mx_common.load.tensors import TensorTable

__all__ = ["EngineModel", "Job", "Loaded", "Settings", "Source", "TensorTable", "load", "tensor_digest"]
