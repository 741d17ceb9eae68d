"""Parts that a run may do without, one package each: worlds, hubs, page, clusters, trackers, engines.

The core imports none of them. It reads ``PROVIDES`` of each package (``services/common/extras.py``) and imports what a recipe
or a command names.
"""
