"""``rollmill doctor``: names the failures that the metrics of a run show, with evidence and a setting to try."""
