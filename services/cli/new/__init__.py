"""``rollmill new``: writes a folder with a recipe, a reward and rows."""
