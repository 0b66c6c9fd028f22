# SPDX-License-Identifier: Apache-2.0
"""What two instances must share for one's KV to be the other's. Compared field by field: a refusal says which."""

from __future__ import annotations

from collections.abc import Mapping

# In the order in which a difference is reported: the most telling first.
FIELDS = (
    "model",
    "dtype",
    "block_size",
    "hash",
    "hash_seed",
    "tensor_parallel",
    "pipeline_parallel",
    "groups",
    "layout",
)


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str] | None:
    """(field, what differs in words) of the first field that differs; None if the KV is interchangeable."""
    for field in (*FIELDS, *sorted(set(ours) | set(theirs))):
        mine, other = ours.get(field, "unset"), theirs.get(field, "unset")
        if mine != other:
            return field, f"{field} is {mine[:80]} here and {other[:80]} there"
    return None


def digest(fingerprint: Mapping[str, str]) -> str:
    """A short name of a fingerprint, to be handed on with a finished request."""
    import hashlib
    import json

    return hashlib.sha256(json.dumps(sorted(fingerprint.items())).encode()).hexdigest()[:16]
