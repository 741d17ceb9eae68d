"""What a verifier decided, read from its text. Knows nothing about policies or rewards."""

from __future__ import annotations

import enum
import re

_TAG = re.compile(r"<verdict>\s*(.*?)\s*</verdict>", re.DOTALL | re.IGNORECASE)


class Verdict(enum.StrEnum):
    APPROVE = "approve"
    REJECT = "reject"
    UNPARSED = "unparsed"


def read_verdict(text: str) -> Verdict:
    """The last well-formed verdict tag decides; a last tag that says something else is no verdict.

    >>> read_verdict("It is wrong. <verdict>reject</verdict>")
    <Verdict.REJECT: 'reject'>
    """
    tags = _TAG.findall(text)
    if not tags:
        return Verdict.UNPARSED
    word = tags[-1].strip().strip(".!*\"'").lower()
    return Verdict(word) if word in (Verdict.APPROVE, Verdict.REJECT) else Verdict.UNPARSED
