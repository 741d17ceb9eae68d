"""Parses a verifier's decision from its text.

1. The last tag that holds one of the two words, ``<verdict>approve</verdict>`` or ``<verdict>reject</verdict>``, decides.
2. Without such a tag the words decide: a text that speaks of approving and not of rejecting approves, and the other way
   round.
3. Any other text is unparsed.
"""

from __future__ import annotations

import enum
import re

_TAG = re.compile(r"<verdict>((?:(?!</?verdict>).)*+)</verdict>", re.DOTALL | re.IGNORECASE)
_APPROVES = re.compile(r"\bapprove[ds]?\b", re.IGNORECASE)
_REJECTS = re.compile(r"\breject(?:s|ed|ing|ion)?\b", re.IGNORECASE)


class ReviewVerdict(enum.StrEnum):
    APPROVE = "approve"
    REJECT = "reject"
    UNPARSED = "unparsed"


def read_verdict(text: str) -> ReviewVerdict:
    """The verdict by the rules above.

    >>> read_verdict("It is wrong. <verdict>reject</verdict>"), read_verdict("I approve it.")
    (<ReviewVerdict.REJECT: 'reject'>, <ReviewVerdict.APPROVE: 'approve'>)
    """
    words = [tag.strip().strip(".!*\"'").lower() for tag in _TAG.findall(text)]
    tagged = [word for word in words if word in (ReviewVerdict.APPROVE, ReviewVerdict.REJECT)]
    if tagged:
        return ReviewVerdict(tagged[-1])
    approves, rejects = bool(_APPROVES.search(text)), bool(_REJECTS.search(text))
    if approves == rejects:
        return ReviewVerdict.UNPARSED
    return ReviewVerdict.APPROVE if approves else ReviewVerdict.REJECT
