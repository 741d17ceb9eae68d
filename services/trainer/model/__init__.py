"""The model being trained and its optimizer."""
