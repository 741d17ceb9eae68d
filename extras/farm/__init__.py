"""The judging farm: jobs of gateways wait in Redis, and workers on any number of nodes run them."""

PROVIDES = {
    "queues": {"redis": "extras.farm.queue:RedisQueue"},
    "workers": {"redis": "extras.farm.__main__:main"},
}
