"""``rollmill deploy``: a recipe's processes as a compose file or as launch scripts. Starts no process."""
