"""Time accounts and states of peers, to and from protobuf, in pairs.

They are for display, so an invalid time is dropped instead of being refused.
"""

from __future__ import annotations

from services.common.pb import account_pb2
from services.common.records.types import by_name
from services.common.telemetry.accounts import AccountState, ActivityTime, PeerState
from services.common.telemetry.activities import ActivityLabel
from services.common.telemetry.components import Component
from services.common.text.encodable import encodable
from services.common.wire.records import finite


def account_to_proto(state: AccountState) -> account_pb2.TimeAccount:
    activities = [
        account_pb2.ActivityTime(
            activity=a.name,
            on=a.on,
            seconds=a.seconds,
            num_now=a.num_now,
            longest_now_s=a.longest_now_s,
            num_done=a.num_done,
            detail=encodable(a.detail),
        )
        for a in state.activities
    ]
    return account_pb2.TimeAccount(**{**by_name(state), "activities": activities})


def _activity_from_proto(proto: account_pb2.ActivityTime) -> ActivityTime:
    return ActivityTime(
        name=ActivityLabel(proto.activity),
        on=Component(proto.on),
        seconds=finite(proto.seconds),
        num_now=proto.num_now,
        longest_now_s=finite(proto.longest_now_s),
        num_done=proto.num_done,
        detail=proto.detail,
    )


def account_from_proto(proto: account_pb2.TimeAccount) -> AccountState:
    return AccountState(
        component=Component(proto.component),
        num_lanes=proto.num_lanes,
        activities=tuple([_activity_from_proto(activity) for activity in proto.activities]),
        progress=proto.progress,
        cpu_s=finite(proto.cpu_s),
    )


def peer_to_proto(peer: PeerState) -> account_pb2.PeerState:
    accounts = [account_to_proto(account) for account in peer.accounts]
    return account_pb2.PeerState(**{**by_name(peer), "detail": encodable(peer.detail), "accounts": accounts})


def peer_from_proto(proto: account_pb2.PeerState) -> PeerState:
    return PeerState(
        component=Component(proto.component),
        address=proto.address,
        silent_s=finite(proto.silent_s),
        detail=proto.detail,
        gauges=dict(proto.gauges) if proto.gauges else {},  # to copy an empty map takes a microsecond
        accounts=tuple([account_from_proto(account) for account in proto.accounts]),
    )
