"""Files of the journal: segments of records, and the index that finds them."""
