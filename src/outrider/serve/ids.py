"""Ids of requests, responses and their parts."""

from __future__ import annotations

import re
from hashlib import sha256
from uuid import uuid4

# header of a request that a router may repeat: with it, the ids of its parts are the same again
ATTEMPT = "x-outrider-attempt"


def is_id(header: str) -> bool:
    """Whether a header gives an id."""
    return re.fullmatch(r"[!-~]{1,200}", header) is not None


def id_of(header: str) -> str:
    """The id that a header gives, or a random one."""
    return header if is_id(header) else uuid4().hex


def derived(prefix: str, id: str) -> str:
    """Id of a part of a response.  It follows from the response's id, so that a repeated one has it, too."""
    return f"{prefix}{sha256(f'{prefix}{id}'.encode()).hexdigest()[:32]}"
