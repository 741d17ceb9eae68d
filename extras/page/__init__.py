"""``rollmill page``: a page in the browser that shows runs from their directories."""

PROVIDES = {"commands": {"page": "extras.page.command:page"}}
