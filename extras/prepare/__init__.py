"""``rollmill data``: prepares rows of problems before a run."""

PROVIDES = {"commands": {"data": "extras.prepare.command:data_app"}}
