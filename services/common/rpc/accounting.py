"""Books the calls that a server answers on its time account: what it does while somebody waits, and when it rests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from services.common.accounts import TimeAccount
from services.common.rpc.interceptors import CallInterceptor, Context


class AccountInterceptor(CallInterceptor):
    """``activities``: what a method ("/package.Service/Method") or a whole service ("/package.Service/") is called in the
    account. Other calls, such as GetStatus, are nobody's time."""

    def __init__(self, account: TimeAccount, activities: Mapping[str, str]) -> None:
        super().__init__()
        self._account = account
        self._activities = activities

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        service = method[: method.rfind("/") + 1]
        name = self._activities.get(method) or self._activities.get(service)
        if name is None:
            yield
            return
        with self._account.during(name):
            yield
        self._account.beat()
