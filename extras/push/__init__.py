"""``rollmill push``: uploads a checkpoint of a run to a model hub."""

PROVIDES = {"commands": {"push": "extras.push.command:push"}}
