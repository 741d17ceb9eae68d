"""``rollmill page``: a page in the browser that shows runs from their directories."""
