"""A store of agent trajectories, token by token: durable, versioned, fast to read at any decision point.

    from prefix_store import PrefixStore
    from prefix_store.trajectory import example_sequence

    with PrefixStore.open("runs/example_store", "a") as store:
        store.append(example_sequence(0))
        print(store.commit("first"))

Knows numpy and zarr's format; never torch, models or environments. docs/prefix_store.md tells more.
"""

from prefix_store.chunked import DamagedData
from prefix_store.disk import StoreError
from prefix_store.store import ForeignFingerprint, PrefixStore, StoreExists, StoreNotFound, check_fingerprint
from prefix_store.trajectory import (
    Context,
    DecisionPoint,
    Extra,
    Fingerprint,
    InvalidSequence,
    Outcome,
    Segment,
    Sequence,
    Source,
)
from prefix_store.versions import VersionRemoved

__all__ = [
    "Context",
    "DamagedData",
    "DecisionPoint",
    "Extra",
    "Fingerprint",
    "ForeignFingerprint",
    "InvalidSequence",
    "Outcome",
    "PrefixStore",
    "Segment",
    "Sequence",
    "Source",
    "StoreError",
    "StoreExists",
    "StoreNotFound",
    "VersionRemoved",
    "check_fingerprint",
]
