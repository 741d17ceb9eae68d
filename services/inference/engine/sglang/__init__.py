"""Generation by SGLang servers, which are child processes; only ``client`` uses their HTTP interface."""
