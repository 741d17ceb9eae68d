"""The recipes' references, key by key: the value in their files, the value here, and the reason for a difference.

    names.py     the reference's recipes, and the sets of them that rows speak of
    table.py     the row, and its comparison with a resolved recipe
    reading.py   conversions of the reference's values, and values that no single key of a recipe holds
    m2po.yaml, rstar2.yaml, behaviour.yaml   the rows
    rows.py      reads them, and says how they are written
    words.yaml   words of the reference and of this project
    pages.py     writes the departures into the READMEs of the families

`tests/unit/recipes/test_reference.py` compares every row with the resolved recipe, and with ROLLMILL_DATA_ROOT every setting
of the reference's files with a row.
"""
